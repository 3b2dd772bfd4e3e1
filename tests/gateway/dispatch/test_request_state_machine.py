"""What becomes of an answer in progress, whatever is told of it and in whichever order: without tasks and clock."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import Overloaded, TandemError, Unavailable
from contracts.events import Event, Failed, Finished, FinishReason, Moved, Prefilled, Token, Tokens
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.request import Cancel, CancelMigration, Route, WorkerRef
from coordinator.request_states import RequestState
from gateway.dispatch.attempt_budget import HANDOFF_FAULTS, MAX_ATTEMPTS, MAX_REPLAYS, AttemptBudget
from gateway.dispatch.request_actions import (
    Action,
    AwaitDecode,
    CancelAttempt,
    Deliver,
    EndMigration,
    Finish,
    LeavePlace,
    PlaceAgain,
    ReturnPlace,
    SendJobs,
)
from gateway.dispatch.request_state_machine import InflightRequest
from gateway.generation.generation_state import GenerationState, OutputDelta
from gateway.prompting.chat_template import Prompting
from tests.gateway.gateway_wires import ask

NUM_TOKENS = 5
R = RequestId("r")
WORKERS = [WorkerRef(WorkerId(name), Incarnation("1"), "", "") for name in ("p0", "d0", "p1", "d1")]
DESTINATIONS = [WorkerRef(WorkerId(name), Incarnation("1"), "", "") for name in ("d2", "d3")]
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
    migration: Route | None = None
    num_migrations: int = 0
    leaving: list[LeavePlace] = field(default_factory=list)

    def __post_init__(self) -> None:
        answer = GenerationState(ask(NUM_TOKENS), self.prompting, ())
        self.live = InflightRequest(R, answer, self.deltas.append, 600.0, route(1, 0), AttemptBudget(lambda ref: True))
        answer.sequencer.epoch = Epoch(1)

    def perform(self, actions: list[Action]) -> None:
        self.actions += actions
        for action in actions:
            match action:
                case Finish(_, end):
                    assert self.live.end is None, "it ends once"
                    self.perform(self.live.give_up_migration("the request has ended"))
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

    def migrate(self, at: int, who: int) -> None:
        """A place for a move is there, which was asked for now, or before what is told next."""
        source, epoch = self.live.source(self.now), self.live.take_epoch()
        if source is not None:
            self.migration = Route(R, epoch, source, DESTINATIONS[who])
            assert self.live.on_migration_placed(self.migration)
            self.num_migrations += 1

    def migrated(self, at: int, who: int) -> None:
        """The destination has what the source told, and tells the newest of it again, then goes on."""
        if (route := self.migration) is not None and self.live.end is None:
            index = max(0, self.live.answer.sequencer.next_index - 1)
            tokens = [Token(number, 100 + number) for number in range(index, min(NUM_TOKENS, index + 1 + at % 2))]
            self.perform(self.live.on_event(route.decode.worker_id, Tokens(R, route.epoch, tokens), self.now))

    def moved(self, at: int, who: int) -> None:
        if (route := self.migration) is not None and self.live.end is None:
            epoch = Epoch(min(self.live.epoch, route.epoch - 1))
            self.perform(self.live.on_event(route.prefill.worker_id, Moved(R, epoch), self.now))

    def unmoved(self, at: int, who: int) -> None:
        if (route := self.migration) is not None and self.live.end is None:
            failed = Failed(R, route.epoch, "unavailable", "told to")
            teller = [route.prefill, route.decode][who]
            self.perform(self.live.on_event(teller.worker_id, failed, self.now))

    def destination_lost(self, at: int, who: int) -> None:
        if (route := self.migration) is None or self.live.end is not None:
            return
        if self.live.needs(route.decode.worker_id, Incarnation("1")):
            self.perform(self.live.on_lost(route.decode.worker_id))

    def source_lost(self, at: int, who: int) -> None:
        if (route := self.migration) is None or self.live.end is not None:
            return
        if self.live.needs(route.prefill.worker_id, Incarnation("1")):
            self.perform(self.live.on_lost(route.prefill.worker_id))

    def untold(self, at: int, who: int) -> None:
        """The time is over in which a destination may tell that it has the answer."""
        if self.migration is not None:
            self.perform(self.live.on_undecoded(self.migration))

    def later(self, at: int, who: int) -> None:
        self.now += 20.0 * at

    def tell(self, who: int, event: Event) -> None:
        if self.live.end is None:  # else it is in no table
            self.perform(self.live.on_event(self._worker(who), event, self.now))

    def _epoch(self, at: int) -> Epoch:
        """Mostly of now; that of an attempt before it comes, too."""
        return Epoch(max(1, self.live.epoch - (at == 3)))

    def _worker(self, who: int) -> WorkerId:
        return self.live.workers[who % len(self.live.workers)].worker_id


KINDS = ["token"] * 6 + [
    "left",
    "left",
    "left",
    "prefilled",
    "finished",
    "failed",
    "lost",
    "undecoded",
    "sent",
    "placed",
    "placed",
    "unplaced",
    "later",
]
MOVES = ["migrate", "migrated", "moved", "unmoved", "destination_lost", "source_lost", "untold"]  # fmt: skip
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


@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS + 3 * MOVES), st.integers(0, 3), st.integers(0, 1)), max_size=40),
    st.integers(1, 3),
)
def test_an_answer_that_moves_goes_on_once_and_every_place_is_given_back(prompting, happened, num_told):
    run = Run(prompting)
    run.prefilled(0, 0)
    for _ in range(num_told):
        run.token(1, 1)
    for kind, at, who in [("migrate", 0, 0), *happened]:
        getattr(run, kind)(at, who)
        check(run)
        open_moves = run.num_migrations - sum(isinstance(action, EndMigration) for action in run.actions)
        assert open_moves == (run.live.migration is not None)
    if run.live.end is None:
        run.perform(run.live.fail(Unavailable("the gateway shuts down")))
    ends = [action for action in run.actions if isinstance(action, EndMigration)]
    assert len(ends) == run.num_migrations
    cancels = [action.cancel for action in run.actions if isinstance(action, CancelAttempt)]
    kept = {cancel.epoch for cancel in cancels if isinstance(cancel, CancelMigration)}
    assert {end.route.epoch for end in ends if not end.is_moved} <= kept, "the source is told to keep the answer"


def begun(prompting: Prompting) -> Run:
    """An answer that decode goes on with, and that begins to move."""
    run = Run(prompting)
    run.prefilled(0, 0)
    run.token(1, 0)
    run.token(1, 1)
    run.migrate(0, 0)
    assert run.live.migration is not None
    return run


@pytest.mark.parametrize("first", ["moved", "migrated"])
def test_whichever_worker_tells_first_that_it_has_moved_the_other_one_changes_nothing(prompting, first: str):
    run = begun(prompting)
    run.moved(0, 0) if first == "moved" else run.migrated(0, 0)
    run.migrated(1, 0)
    run.moved(0, 0)
    ended = [action for action in run.actions if isinstance(action, EndMigration)]
    assert [(end.is_moved, end.route.epoch) for end in ended] == [(True, 2)]
    assert (run.live.epoch, run.live.workers, run.live.answer.token_ids) == (2, [DESTINATIONS[0]], [100, 101, 102])
    assert not any(isinstance(action, LeavePlace) for action in run.actions)


def test_what_left_before_its_source_was_told_to_keep_it_is_replayed(prompting):
    run = begun(prompting)
    run.destination_lost(0, 0)
    assert run.live.migration is None and not run.leaving
    run.moved(0, 0)
    run.left(0, 0)
    assert run.is_searching and run.live.epoch == 3, "not the epoch of the move"


def lost_source(prompting: Prompting) -> Run:
    """An answer that moves and whose source is lost: its destination may have taken it over."""
    run = begun(prompting)
    run.source_lost(0, 0)
    assert isinstance(run.actions[-1], AwaitDecode) and run.live.migration is not None and not run.leaving
    assert not run.live.needs(WORKERS[1].worker_id, Incarnation("1"))
    return run


def test_an_answer_whose_source_is_lost_goes_on_at_the_destination_that_has_it(prompting):
    run = lost_source(prompting)
    run.migrated(1, 0)
    assert (run.live.epoch, run.live.workers, run.live.answer.token_ids) == (2, [DESTINATIONS[0]], [100, 101, 102])
    run.untold(0, 0)
    assert not run.leaving and not run.is_searching and not run.live.is_orphaned
    assert run.live.source(run.now) == DESTINATIONS[0], "it may move again"


@pytest.mark.parametrize("then", ["untold", "unmoved", "destination_lost"])
def test_an_answer_whose_source_is_lost_is_replayed_once_the_destination_does_not_have_it(prompting, then: str):
    run = lost_source(prompting)
    getattr(run, then)(0, 1)
    assert run.live.migration is None and len(run.leaving) == 1
    run.left(0, 0)
    assert run.is_searching and run.live.epoch == 3, "not the epoch of the move"
    assert [end.is_moved for end in run.actions if isinstance(end, EndMigration)] == [False]


@pytest.mark.parametrize("code", sorted(HANDOFF_FAULTS))
def test_an_answer_that_its_destination_can_not_go_on_with_is_replayed(prompting, code: str):
    run = begun(prompting)
    run.moved(0, 0)
    run.perform(run.live.on_event(DESTINATIONS[0].worker_id, Failed(R, Epoch(2), code, "told to"), run.now))
    assert run.live.end is None and len(run.leaving) == 1
    run.left(0, 0)
    assert run.is_searching and run.live.tries.refusers == [DESTINATIONS[0].worker_id]


def test_an_answer_that_went_on_without_its_prefill_may_move(prompting):
    run = Run(prompting)
    run.prefilled(0, 0)
    run.token(1, 0)
    run.lost(0, 0)
    assert run.live.is_orphaned and run.live.source(run.now) is None
    run.token(1, 1)
    assert not run.live.is_orphaned and run.live.source(run.now) == WORKERS[1]


def test_a_source_in_doubt_is_told_again(prompting):
    run = begun(prompting)
    run.unmoved(0, 0)
    run.unmoved(0, 0)
    cancels = [action for action in run.actions if isinstance(action, CancelAttempt)]
    kinds = [(action.workers, type(action.cancel)) for action in cancels]
    source = [WORKERS[1]]
    assert kinds == [(source, CancelMigration), ([DESTINATIONS[0]], Cancel), (source, CancelMigration)]
    run.token(1, 1)
    assert run.live.answer.token_ids == [100, 101, 102], "it goes on there"


def test_a_source_in_doubt_whose_answer_has_moved_lets_it_go(prompting):
    run = begun(prompting)
    run.migrated(0, 0)
    run.unmoved(0, 0)
    assert run.live.end is None
    last = run.actions[-1]
    assert isinstance(last, CancelAttempt) and last.workers == [WORKERS[1]] and last.cancel.epoch == 2


def test_each_source_that_has_not_said_that_it_knows_is_told_at_the_end(prompting):
    run = begun(prompting)
    run.migrated(1, 0)
    run.migrate(0, 1)
    run.migrated(1, 0)
    assert run.live.left == (WORKERS[1], DESTINATIONS[0]), "whichever came later"
    run.perform(run.live.on_event(WORKERS[1].worker_id, Moved(R, Epoch(1)), run.now))
    assert run.live.left == (DESTINATIONS[0],) and run.live.workers == [DESTINATIONS[1]]
    run.failed(1, 0)
    run.left(0, 0)
    (cancel,) = [action for action in run.actions if isinstance(action, CancelAttempt) and action.cancel.epoch == 3]
    assert cancel.workers == [DESTINATIONS[1], DESTINATIONS[0]] and run.live.left == (), "before it is placed again"


def test_an_answer_that_moves_back_fails_there_as_a_move_and_not_as_what_was_left(prompting):
    run = begun(prompting)
    run.migrated(1, 0)
    back = Route(R, run.live.take_epoch(), DESTINATIONS[0], WORKERS[1])
    assert run.live.on_migration_placed(back)
    run.perform(run.live.on_event(WORKERS[1].worker_id, Failed(R, back.epoch, "unavailable", "no room"), run.now))
    assert run.live.migration is None and run.live.workers == [DESTINATIONS[0]] and run.live.left == (WORKERS[1],)


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
    assert live.tries.num_attempts == len(searches) + 1
    if not live.is_begun:
        assert live.tries.num_attempts <= MAX_ATTEMPTS or live.tries.unreached


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


@pytest.mark.parametrize("is_told", [True, False])
def test_workers_that_told_all_before_the_replies_to_their_jobs_came_are_not_cancelled(prompting, is_told: bool):
    """An answer that its client left ends without them: a cancel may have overtaken its job."""
    run = Run(prompting)
    run.prefilled(1, 0)
    for _ in range(NUM_TOKENS):
        run.token(1, 0 if run.live.answer.sequencer.next_index == 0 else 1)
    run.finished(1, 1) if is_told else run.perform([Finish("left", RequestState.CANCELLED)])
    assert run.live.end is not None
    actions = run.live.on_sent(run.live.route, 1.0, {})
    assert [type(action) for action in actions] == ([] if is_told else [CancelAttempt])
