"""What becomes of an answer in progress, whatever is told of it and in whichever order: without tasks and clock."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import Overloaded, TandemError, Unavailable
from contracts.events import Event, Failed, Finished, FinishReason, Prefilled, Token, Tokens
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.request import Route, WorkerRef
from gateway.dispatch.request_state_machine import (
    MAX_ATTEMPTS,
    MAX_REPLAYS,
    Action,
    CancelAttempt,
    Deliver,
    Finish,
    InflightRequest,
    LeavePlace,
    PlaceAgain,
    ReturnPlace,
    SendJobs,
)
from gateway.generation.generation_state import GenerationState, OutputDelta
from gateway.prompting.chat_template import Prompting
from tests.gateway.gateway_wires import ask

NUM_TOKENS = 5
R = RequestId("r")
WORKERS = [WorkerRef(WorkerId(name), Incarnation("1"), "", "") for name in ("p0", "d0", "p1", "d1")]
FAULTS = ["overloaded", "peer_lost", "transfer_failed", "corrupt", "internal", "out_of_blocks"]


@pytest.fixture(scope="module")
def prompting(checkpoint):
    prompting = Prompting(checkpoint)
    yield prompting
    prompting.close()


def route(epoch: int, pair: int) -> Route:
    return Route(R, Epoch(epoch), WORKERS[2 * pair], WORKERS[2 * pair + 1])


@dataclass
class Run:
    """An answer, what was to be done for it, and places that are given as it asks for them."""

    prompting: Prompting
    now: float = 0.0
    actions: list[Action] = field(default_factory=list)
    deltas: list[OutputDelta] = field(default_factory=list)
    is_searching: bool = False
    leaving: list[LeavePlace] = field(default_factory=list)

    def __post_init__(self) -> None:
        answer = GenerationState(ask(NUM_TOKENS), self.prompting, ())
        self.live = InflightRequest(R, answer, self.deltas.append, 600.0, route(1, 0), lambda ref: True)
        answer.sequencer.epoch = Epoch(1)

    def perform(self, actions: list[Action]) -> None:
        self.actions += actions
        for action in actions:
            match action:
                case Finish(_, end):
                    assert self.live.end is None, "it ends once"
                    self.live.end = end
                case Deliver(delta):
                    self.live.on_delta(delta)
                case LeavePlace():
                    self.leaving.append(action)
                case PlaceAgain():
                    assert not self.is_searching, "one search at a time"
                    self.is_searching = True

    # what may happen; each takes two numbers to choose by

    def token(self, at: int, who: int) -> None:
        index = max(0, min(NUM_TOKENS - 1, self.live.answer.sequencer.next_index + at - 1))
        self.tell(who, Tokens(R, self._epoch(at), [Token(index, 100 + index)]))

    def prefilled(self, at: int, who: int) -> None:
        self.tell(who, Prefilled(R, self._epoch(at), 0, {}))

    def finished(self, at: int, who: int) -> None:
        self.tell(who, Finished(R, self._epoch(at), NUM_TOKENS, FinishReason.LENGTH, {}))

    def failed(self, at: int, who: int) -> None:
        self.tell(who, Failed(R, self._epoch(at), FAULTS[at % len(FAULTS)], "told to"))

    def lost(self, at: int, who: int) -> None:
        if self.live.end is None and self.live.needs(self._worker(who), Incarnation("1")):
            self.perform(self.live.on_lost(self._worker(who)))

    def undecoded(self, at: int, who: int) -> None:
        self.perform(self.live.on_undecoded(self.live.route))

    def left(self, at: int, who: int) -> None:
        if self.leaving:
            self.perform(self.live.on_left(self.leaving.pop(0), self.now))

    def sent(self, at: int, who: int) -> None:
        refusals: dict[WorkerId, TandemError] = {self._worker(who): [Unavailable("no"), Overloaded("full")][at % 2]}
        self.perform(self.live.on_sent(self.live.route, self.now, refusals if at else {}))

    def placed(self, at: int, who: int) -> None:
        if self.is_searching:
            self.is_searching = False
            self.perform(self.live.on_placed(route(self.live.epoch, who % 2)))

    def unplaced(self, at: int, who: int) -> None:
        if not self.is_searching:
            return
        if self.live.may_look_on(self.now) and self.live.end is None:
            return self.live.look_on()
        self.is_searching = False
        self.perform(self.live.on_unplaced(Unavailable("none"), Unavailable("left")))

    def later(self, at: int, who: int) -> None:
        self.now += 20.0 * at

    def tell(self, who: int, event: Event) -> None:
        if self.live.end is None:  # else it is in no table
            self.perform(self.live.on_event(self._worker(who), event, self.now))

    def _epoch(self, at: int) -> Epoch:
        """Mostly of now; that of an attempt before it comes, too."""
        return Epoch(max(1, self.live.epoch - (at == 3)))

    def _worker(self, who: int) -> WorkerId:
        return self.live.workers[who % 2].worker_id


KINDS = ["token"] * 6 + [
    "left", "left", "left", "prefilled", "finished", "failed", "lost", "undecoded", "sent", "placed", "placed",
    "unplaced", "later",
]  # fmt: skip
happenings = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 1)), max_size=40)


@settings(max_examples=400)
@given(happened=happenings)
def test_whatever_happens_it_ends_once_and_shows_each_token_once(prompting, happened):
    run = Run(prompting)
    for kind, at, who in happened:
        getattr(run, kind)(at, who)
        check(run)
    if run.leaving:
        run.left(0, 0)
        check(run)
    if run.live.end is None:
        run.perform(run.live.fail(Unavailable("the gateway shuts down")))
    check(run)
    assert run.live.end is not None
    run.placed(0, 0)  # a search that was on its way as it ended
    assert not run.is_searching
    places = [action for action in run.actions if isinstance(action, SendJobs | ReturnPlace)]
    assert len(places) <= sum(isinstance(action, PlaceAgain) for action in run.actions)


def check(run: Run) -> None:
    live = run.live
    ends = [delta for delta in run.deltas if delta.finish is not None or delta.failed is not None]
    finishes = [action for action in run.actions if isinstance(action, Finish)]
    assert len(ends) == len(finishes) == (live.end is not None)
    assert not ends or run.deltas[-1] is ends[0], "nothing follows the end"
    assert live.answer.token_ids == [100 + index for index in range(live.answer.num_tokens)]
    assert live.is_moving == (run.is_searching or bool(run.leaving)) or live.end is not None
    assert len(run.leaving) <= 1
    searches = [action for action in run.actions if isinstance(action, PlaceAgain)]
    left = [action for action in run.actions if isinstance(action, CancelAttempt)]
    assert len(left) >= len(searches), "what is left is cancelled"
    assert sum(search.is_replay for search in searches) <= MAX_REPLAYS
    assert live.num_attempts == len(searches) + 1
    if not live.is_begun:
        assert live.num_attempts <= MAX_ATTEMPTS or live.unreached


def test_a_job_goes_on_behind_what_was_shown_within_what_time_is_left(prompting):
    run = Run(prompting)
    run.prefilled(0, 0)
    run.token(1, 0)
    job = run.live.job(GatewayId("g"), now=590.0)
    assert (job.num_answered, job.token_ids[-1]) == (1, 100)
    assert run.live.job(GatewayId("g"), now=700.0).timeout_s > 0
    assert job.timeout_s == 10.0


def test_what_ended_while_it_had_no_place_gives_the_new_one_back(prompting):
    run = Run(prompting)
    run.lost(0, 0)
    run.left(0, 0)
    run.perform(run.live.fail(Unavailable("the client left")))
    run.placed(0, 1)
    assert isinstance(run.actions[-1], ReturnPlace) and run.actions[-1].epoch == 2
