"""How often an answer goes on elsewhere, in every order of tokens, losses and refusals. No sockets."""

import asyncio
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import Overloaded, TandemError, Unavailable
from contracts.events import Event, Failed, Prefilled, Token, Tokens
from contracts.ids import GatewayId, Incarnation, RequestId, WorkerId
from contracts.node import WorkerRole
from contracts.request import Cancel, Job
from gateway.dispatch.attempt_budget import MAX_ATTEMPTS, MAX_REPLAYS
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.registry_client import StorePlacement
from gateway.dispatch.request_state_machine import InflightRequest
from gateway.generation.generation_state import GenerationState, OutputDelta
from gateway.prompting.chat_template import Prompting
from testing.memory_store import MemoryStore
from tests.gateway.gateway_wires import Wires, ask, join

pytestmark = pytest.mark.usefixtures("at_once")

MIXED = {f"m{i}": WorkerRole.MIXED for i in range(3)}


@pytest.fixture(scope="module")
def prompting(checkpoint):
    return Prompting(checkpoint)


class Table:
    """One answer of a thousand tokens, and who has it now. `num_lost`: what should have been counted."""

    def __init__(self, prompting: Prompting, workers: dict[str, WorkerRole]) -> None:
        self.store, self.wires, self.workers = MemoryStore(alive_s=math.inf), Wires(), workers
        self.dispatch = Dispatcher(StorePlacement(self.store, GatewayId("g")), GatewayId("g"), "s", "m")
        self.dispatch.workers = self.wires  # type: ignore[assignment]
        self.answer, self.pieces = GenerationState(ask(1000), prompting, ()), list[OutputDelta]()
        self.num_attempts, self.num_lost, self.num_told, self.has_begun = 1, 0, 0, False

    async def begin(self) -> None:
        await join(self.store, self.workers)
        deadline_s = time.monotonic() + 600
        await self.dispatch.begin(RequestId("r"), self.answer, self.pieces.append, deadline_s)
        await self.settle()

    @property
    def live(self) -> InflightRequest:
        return self.dispatch._live[RequestId("r")]

    @property
    def has_ended(self) -> bool:
        return not self.dispatch._live

    @property
    def holder(self) -> WorkerId:
        return self.live.route.prefill.worker_id

    async def settle(self) -> None:
        """Cancels are taken; jobs wait."""
        for _ in range(30):
            for send in [send for send in self.wires.sends if isinstance(send[1], Cancel)]:
                self.wires.sends.remove(send)
                send[2].set_result(None)
            await asyncio.sleep(0)

    def decide(self, error: TandemError | None) -> None:
        """What becomes of the jobs that wait."""
        for _, job, future in self.wires.sends:
            assert isinstance(job, Job)
            future.set_exception(error) if error is not None else future.set_result(None)
        self.wires.sends.clear()

    def tell(self, event: Event) -> None:
        self.dispatch._on_event(self.holder, event)

    # what may happen

    def token(self) -> None:
        index = self.answer.sequencer.next_index
        self.tell(Tokens(RequestId("r"), self.live.route.epoch, [Token(index, 100)]))
        self.num_told, self.has_begun = self.num_told + 1, True

    def prefilled(self) -> None:
        self.tell(Prefilled(RequestId("r"), self.live.route.epoch, 0, {}))
        self.has_begun = True

    def taken(self) -> None:
        self.decide(None)

    def refused(self) -> None:
        if self.wires.sends:
            self._leaves(is_lost=False)
            self.decide(Unavailable("no"))

    def full(self) -> None:
        if self.wires.sends:
            self._leaves(is_lost=False)
            self.decide(Overloaded("full"))

    def told_full(self) -> None:
        if self.has_begun:
            self._leaves(is_lost=False)
            self.tell(Failed(RequestId("r"), self.live.route.epoch, "overloaded", "full"))

    def lost(self) -> None:
        self._leaves(is_lost=True)
        self.dispatch._on_lost(self.holder, Incarnation("1"), "test")

    def lost_twice(self) -> None:
        self.lost()
        self.dispatch._on_lost(self.holder, Incarnation("1"), "test")

    def lost_and_refused(self) -> None:
        self.lost()
        self.decide(Unavailable("no"))

    def lost_before_a_token_is_read(self) -> None:
        """Lose the worker before a token, one of several in a frame or of another worker, is read."""
        self.lost()
        was_begun = self.has_begun
        self.token()
        self.num_told = 0
        if not was_begun:
            self.num_attempts, self.num_lost = self.num_attempts - 1, 1

    def _leaves(self, is_lost: bool) -> None:
        if not self.has_begun:
            self.num_attempts += 1
        elif is_lost or self.num_told or not self.num_lost:
            self.num_lost += 1
        self.num_told = 0


ACTS = [
    Table.token,
    Table.token,
    Table.prefilled,
    Table.taken,
    Table.refused,
    Table.full,
    Table.told_full,
    Table.lost,
    Table.lost_twice,
    Table.lost_and_refused,
    Table.lost_before_a_token_is_read,
]


@given(acts=st.lists(st.sampled_from(ACTS), min_size=1, max_size=30))
@settings(max_examples=300)
def test_each_attempt_that_is_left_counts_once(prompting, acts):
    asyncio.run(_check(Table(prompting, MIXED), acts))


async def _check(table: Table, acts: list) -> None:
    await table.begin()
    for act in acts:
        act(table)
        await table.settle()
        is_over = table.num_lost > MAX_REPLAYS or table.num_attempts > MAX_ATTEMPTS
        assert table.has_ended == is_over
        assert table.dispatch.num_replays == min(table.num_lost, MAX_REPLAYS)
        if is_over:
            break
        assert table.live.tries.num_replays == table.num_lost
    table.dispatch.cancel(RequestId("r"), "over")
    table.decide(None)
    await table.settle()
    assert {(w.pending_tokens, w.reserved_tokens) for w in await table.store.workers()} == {(0, 0)}


def test_who_is_full_before_anything_was_shown_ends_the_answer(prompting):
    """The client is told to come again; one that has read a token can't be."""
    table = Table(prompting, MIXED)

    async def full() -> None:
        await table.begin()
        table.taken()
        table.tell(Failed(RequestId("r"), table.live.route.epoch, "overloaded", "full"))
        await table.settle()

    asyncio.run(full())
    assert table.has_ended and table.dispatch.num_replays == 0
    assert [piece.failed.code for piece in table.pieces if piece.failed] == [Overloaded.code]


def test_an_attempt_that_is_lost_before_it_got_ahead_gives_the_next_no_more_time(prompting):
    table = Table(prompting, MIXED)

    async def lose() -> list[float]:
        await table.begin()
        table.taken()
        table.token()
        until = []
        for _ in range(2):
            table.lost()
            await table.settle()
            table.taken()
            until.append(table.live.tries.give_up_s)
        table.dispatch.cancel(RequestId("r"), "over")
        await table.settle()
        return until

    first, second = asyncio.run(lose())
    assert first == second > 0


@pytest.mark.parametrize("has_decoded", [False, True])
@pytest.mark.parametrize(
    "order", [("prefill", "decode"), ("decode", "prefill"), ("prefill", "told"), ("told", "decode")]
)
def test_a_pair_that_is_lost_counts_once_and_the_others_take_it(prompting, order, has_decoded):
    """One after the other, or one, and the other says so."""
    roles = {"p0": WorkerRole.PREFILL, "d0": WorkerRole.DECODE, "p1": WorkerRole.PREFILL, "d1": WorkerRole.DECODE}
    asyncio.run(_lose_pair(Table(prompting, roles), order, has_decoded))


async def _lose_pair(table: Table, order: tuple[str, str], has_decoded: bool) -> None:
    await table.begin()
    table.taken()
    table.token()
    route = table.live.route
    if has_decoded:
        table.dispatch._on_event(route.decode.worker_id, Tokens(RequestId("r"), route.epoch, [Token(1, 100)]))
    table.wires.silent = [route.prefill.worker_id, route.decode.worker_id]
    for which in order:
        if which == "told":  # by who is there still
            teller = route.decode if order[0] == "prefill" else route.prefill
            fault = Failed(RequestId("r"), route.epoch, "peer_lost", "gone")
            table.dispatch._on_event(teller.worker_id, fault)
        else:
            lost = route.prefill if which == "prefill" else route.decode
            table.dispatch._on_lost(lost.worker_id, Incarnation("1"), "test")
        await table.settle()
    assert (table.dispatch.num_replays, table.live.tries.num_replays) == (1, 1)
    jobs = {ref.worker_id: job for ref, job, _ in table.wires.sends if isinstance(job, Job)}
    assert jobs.keys() == {"p0", "p1", "d0", "d1"} - set(table.wires.silent)
    assert {(job.epoch, job.num_answered) for job in jobs.values()} == {(2, 1 + has_decoded)}
    table.taken()
    await table.settle()
    table.dispatch.cancel(RequestId("r"), "over")
    await table.settle()
