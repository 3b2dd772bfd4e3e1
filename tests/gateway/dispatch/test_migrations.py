"""Which of its answers a gateway moves when its policy orders it, how many, and what it counts."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import pytest

from contracts.errors import Unavailable
from contracts.events import Token, Tokens
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.request import AdapterRef, Route, WorkerRef
from coordinator.migration_policy import MigrationOrder, MigrationReason
from gateway.dispatch import migrations
from gateway.dispatch.attempt_budget import AttemptBudget
from gateway.dispatch.migrations import LOOK_PERIOD_S, MAX_AT_ONCE, Migrations
from gateway.dispatch.registry_client import Placement
from gateway.dispatch.request_state_machine import InflightRequest
from gateway.dispatch.worker_pool import WorkerPool
from gateway.generation.generation_state import GenerationState
from gateway.prompting.chat_template import Prompting
from gateway.settings import GatewaySettings
from tests.gateway.gateway_wires import ask
from tests.waiting import async_until

A, B, C = (WorkerRef(WorkerId(name), Incarnation("1"), "", "") for name in "abc")
GATEWAY = GatewayId("g")
SOON_S = 30.0


class Places:
    """The store: it gives the destination `C`, or none."""

    def __init__(self) -> None:
        self.asked: list[tuple[RequestId, WorkerId, tuple[WorkerId, ...]]] = []
        self.ended: list[tuple[RequestId, bool]] = []
        self.is_full = False

    async def place_migration(
        self, request_id: RequestId, epoch: Epoch, source: WorkerRef, need_tokens: int, exclude: Sequence[WorkerId]
    ) -> Route:
        self.asked.append((request_id, source.worker_id, tuple(exclude)))
        if self.is_full:
            raise Unavailable("no room")
        return Route(request_id, epoch, source, C)

    async def end_migration(self, request_id: RequestId, epoch: Epoch, is_moved: bool) -> None:
        self.ended.append((request_id, is_moved))


class Wires:
    """The worker pool: it takes all jobs."""

    loads = ()
    strange = (WorkerId("strange"),)
    silent = (WorkerId("silent"),)

    def lacking(self, adapter: AdapterRef | None) -> list[WorkerId]:
        return [] if adapter is None else [WorkerId("bare")]

    async def send(self, worker: WorkerRef, message: object) -> None: ...


class Orders:
    """The policy: it gives the same order once, or at each look."""

    def __init__(self, order: MigrationOrder, is_lasting: bool) -> None:
        self._order, self._is_lasting, self.num_asked = order, is_lasting, 0

    def decide(self, nodes: object, now: float) -> list[MigrationOrder]:
        self.num_asked += 1
        return [self._order] if self._is_lasting or self.num_asked == 1 else []


@pytest.fixture(scope="module")
def prompting(checkpoint):
    prompting = Prompting(checkpoint)
    yield prompting
    prompting.close()


def answer(
    prompting: Prompting, name: str, worker: WorkerRef, num_tokens: int, adapter: AdapterRef | None = None
) -> InflightRequest:
    """Return an answer that `worker` decodes, of which so many tokens were read."""
    state = GenerationState(replace(ask(64), adapter=adapter), prompting, ())
    request_id = RequestId(name)
    route = Route(request_id, Epoch(1), worker, worker)
    live = InflightRequest(request_id, state, lambda delta: None, 600.0, route, AttemptBudget(lambda ref: True))
    state.sequencer.epoch = Epoch(1)
    for index in range(num_tokens):
        live.on_event(worker.worker_id, Tokens(request_id, Epoch(1), [Token(index, 100 + index)]), 0.0)
    live.decoder = worker.worker_id
    return live


@asynccontextmanager
async def moving(
    answers: list[InflightRequest], order: MigrationOrder, is_lasting: bool = False
) -> AsyncIterator[tuple[Migrations, Places]]:
    places, orders = Places(), Orders(order, is_lasting)
    parts = cast(Placement, places), GATEWAY, cast(WorkerPool, Wires()), lambda live, actions: None
    mover = Migrations(*parts, orders, random.Random(1))
    running = asyncio.create_task(mover.run(lambda: answers))
    try:
        await async_until(lambda: orders.num_asked > 1, SOON_S)
        yield mover, places
    finally:
        running.cancel()
        await mover.stop()


def order_of(share: float, reason: MigrationReason = MigrationReason.BALANCE) -> MigrationOrder:
    return MigrationOrder(A.worker_id, reason, share, frozenset([B.worker_id]))


async def test_the_youngest_of_the_source_move_to_no_excluded_worker(prompting: Prompting):
    answers = [answer(prompting, f"r{number}", A, number + 1) for number in (3, 0, 2, 1)]
    answers.append(answer(prompting, "other", B, 1))
    async with moving(answers, order_of(0.5)) as (_, places):
        await async_until(lambda: len(places.asked) == 2, SOON_S)
    assert places.asked == [(RequestId(name), "a", ("b", "strange", "silent")) for name in ("r0", "r1")]
    assert [live.migration is not None for live in answers] == [False, True, False, True, False]


async def test_an_answer_with_an_adapter_moves_to_no_worker_that_lacks_it(prompting: Prompting):
    answers = [answer(prompting, "r", A, 1, AdapterRef("sql", b"x" * 16))]
    async with moving(answers, order_of(1.0)) as (_, places):
        await async_until(lambda: len(places.asked) == 1, SOON_S)
    assert places.asked == [("r", "a", ("b", "strange", "silent", "bare"))]


async def test_a_fraction_of_an_answer_moves_now_and_then(prompting: Prompting):
    """So that of many gateways with one answer each as many move as are ordered."""
    answers = [answer(prompting, "r", A, 1)]
    async with moving(answers, order_of(0.25), is_lasting=True) as (_, places):
        await asyncio.sleep(LOOK_PERIOD_S)
        await async_until(lambda: answers[0].migration is not None, SOON_S)
    assert len(places.asked) == 1


async def test_so_many_move_at_once_and_no_more(prompting: Prompting):
    answers = [answer(prompting, f"r{number}", A, 1) for number in range(MAX_AT_ONCE + 3)]
    async with moving(answers, order_of(1.0), is_lasting=True) as (mover, places):
        await async_until(lambda: len(places.asked) == MAX_AT_ONCE, SOON_S)
        moved = next(live for live in answers if live.migration is not None)
        route, moved.migration = moved.migration, None
        assert route is not None
        moved.decoder = C.worker_id
        mover.ended(moved, route, is_moved=True)
        await async_until(lambda: len(places.asked) == MAX_AT_ONCE + 1, SOON_S)
        await async_until(lambda: places.ended == [(moved.request_id, True)], SOON_S)
    assert mover.counts == {("committed", MigrationReason.BALANCE): 1}


async def test_of_long_answers_fewer_move_at_once(prompting: Prompting, monkeypatch: pytest.MonkeyPatch):
    answers = [answer(prompting, f"r{number}", A, 1) for number in range(4)]
    num_tokens = len(answers[0].answer.all_token_ids)
    monkeypatch.setattr(migrations, "MAX_TOKENS_AT_ONCE", 2 * num_tokens)
    async with moving(answers, order_of(1.0), is_lasting=True) as (_, places):
        await async_until(lambda: len(places.asked) == 2, SOON_S)
        await asyncio.sleep(2 * LOOK_PERIOD_S)
        assert len(places.asked) == 2


async def test_without_a_place_it_stays_and_counts_as_nothing(prompting: Prompting):
    answers = [answer(prompting, "r", A, 1)]
    async with moving(answers, order_of(1.0, MigrationReason.MEMORY)) as (mover, places):
        places.is_full = True
        live = answer(prompting, "late", A, 1)
        answers.append(live)
        mover._begin([live], [order_of(1.0)])
        await async_until(lambda: len(places.asked) == 2, SOON_S)
        await async_until(lambda: not live.is_migration_placed, SOON_S)
        assert live.migration is None and not mover.counts and not places.ended


def test_a_reason_that_is_none_is_refused_by_its_name():
    assert GatewaySettings(migrate_for=" memory, balance ").migration_reasons == ["memory", "balance"]  # pyright: ignore[reportCallIssue]
    assert GatewaySettings(migrate_for="").migration_reasons == []  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match="'luck' is none of drain, memory, balance"):
        GatewaySettings(migrate_for="drain,luck")  # pyright: ignore[reportCallIssue]
