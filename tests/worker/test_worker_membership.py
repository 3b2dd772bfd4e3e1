"""What a worker tells the registry when that was away for a while. No core, no HTTP."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest

from contracts.errors import RegistryError, Unavailable
from contracts.ids import Epoch, Incarnation, RequestId, WorkerId
from contracts.node import Node, NodeInfo, NodeLoad, WorkerRole
from coordinator.request_states import RequestState
from coordinator.store.store import StateTransition
from kv_transfer.settings import TransferSettings
from process.sockets import listen
from testing.memory_store import MemoryStore
from tests.nodes import node_info
from tests.waiting import async_until
from tests.worker.fronts import RememberingCore, make_state, make_status
from worker.front import membership
from worker.front.membership import MAX_POOL, Membership, takers
from worker.front.serve import _serve
from worker.front.worker_state import WorkerState
from worker.messages import CoreFrame, ToFront
from worker.settings import WorkerSettings


@pytest.fixture(autouse=True)
def beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the tests, and none that a slow machine lets in between."""
    monkeypatch.setattr(membership, "BEAT_PERIOD_S", 3600.0)


class TransitionStore(MemoryStore):
    """Away until `is_there`; remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there, self.num_refused = True, 0
        self.told: list[StateTransition] = []

    async def heartbeat(self, worker_id: WorkerId, incarnation: Incarnation, load: NodeLoad) -> bool:
        if not self.is_there:
            raise Unavailable("Redis does not answer")
        return await super().heartbeat(worker_id, incarnation, load)

    async def advance(self, moves: Sequence[StateTransition]) -> list[bool]:
        if not self.is_there:
            self.num_refused += 1
            raise Unavailable("Redis does not answer")
        self.told += moves
        return [True] * len(moves)


def move(number: int) -> StateTransition:
    return StateTransition(RequestId(f"r{number}"), Epoch(1), RequestState.TRANSFERRING)


class LateStore(MemoryStore):
    """Does not answer the first `num_late` that join."""

    def __init__(self, num_late: float) -> None:
        super().__init__()
        self.num_late = num_late

    async def join(self, info: NodeInfo, again: bool = False) -> bool:
        self.num_late -= 1
        if self.num_late >= 0:
            raise RegistryError("Redis does not answer at redis://r", "does not answer")
        return await super().join(info, again)


async def test_a_registry_that_is_late_is_waited_for_at_the_start_and_not_for_long(monkeypatch):
    monkeypatch.setattr("coordinator.store.connect.START_RETRY_S", 0.001)
    member = Membership(LateStore(num_late=3), make_state())
    await member.start()
    await member.stop()
    monkeypatch.setattr("coordinator.store.connect.START_PATIENCE_S", 0.01)
    with pytest.raises(RegistryError):
        await Membership(LateStore(num_late=math.inf), make_state()).start()


class ReportingCore(RememberingCore):
    """Says how it is once, and lives on."""

    async def frames(self) -> AsyncIterator[ToFront]:
        yield CoreFrame({}, [], make_status(7))
        await asyncio.Event().wait()


async def test_a_core_is_heard_while_the_registry_is_waited_for():
    """Otherwise it would be taken for one that hangs."""

    class Waiting(MemoryStore):
        async def join(self, info: NodeInfo, again: bool = False) -> bool:
            await async_until(lambda: state.num_turns == 7)
            return await super().join(info, again)

    state = make_state()
    state.core = ReportingCore()  # type: ignore[assignment]
    settings = WorkerSettings.model_validate({"role": "prefill", "secret": "s", "drain_timeout_s": 0.0})
    with listen("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(_serve(settings, state, Waiting(), listener))
        await async_until(lambda: state.joined)
        serving.cancel()
        await asyncio.wait([serving])
    assert serving.cancelled()


async def test_losing_the_registry_is_said_once_and_so_is_its_return(caplog: pytest.LogCaptureFixture):
    store = TransitionStore()
    member = Membership(store, make_state())
    await member.start()
    for store.is_there in (True, False, False, True, True):
        await member.beat_once()
    await member.stop()
    assert [record.message for record in caplog.records] == [
        "not in the registry: Redis does not answer",
        "in the registry again",
    ]


async def test_a_worker_whose_id_another_one_took_says_so_once(caplog: pytest.LogCaptureFixture):
    store, state = MemoryStore(), make_state()
    member = Membership(store, state)
    await member.start()
    await store.join(msgspec.structs.replace(state.info, incarnation=Incarnation("newer")))
    for _ in range(3):
        await member.beat_once()
    await member.stop()
    assert [record.message for record in caplog.records] == [
        "the registry does not know this worker any more; joining again",
        f"not in the registry: worker id {state.info.worker_id!r} belongs to a newer process; give this one another id",
    ]
    assert not state.joined


async def test_of_two_with_one_id_each_says_so_and_the_first_serves_again_when_the_second_has_left(caplog):
    store, first, second = MemoryStore(), make_state(), make_state()
    second.info = msgspec.structs.replace(second.info, incarnation=Incarnation("newer"))
    members = [Membership(store, state) for state in (first, second)]
    await members[0].start()
    assert caplog.messages == []
    await members[1].start()
    assert caplog.messages.pop().endswith(
        "if it was not this one before a restart, give each an id of its own (worker_id)"
    )
    await members[0].beat_once()
    assert not first.joined and second.joined and "belongs to a newer process" in caplog.messages[-1]
    await members[1].stop()
    await members[0].beat_once()
    assert first.joined and [one.info.incarnation for one in await store.nodes()] == [first.info.incarnation]
    await members[0].stop()


async def test_a_worker_that_joins_again_tells_at_once_how_it_is():
    """It drains, and the registry has lost everything: it is to be given no work."""
    store, state = MemoryStore(), make_state()
    member = Membership(store, state)
    await member.start()
    await store.leave(state.info.worker_id, state.info.incarnation)
    state.draining = True
    await member.beat_once()
    assert [node.load.draining for node in await store.nodes()] == [True]
    await member.stop()


@pytest.mark.parametrize("core_alive", [False, True])
async def test_a_worker_that_leaves_because_its_core_died_is_counted(core_alive: bool):
    """Its page of metrics ends with it: nobody would see it there."""
    store, state = MemoryStore(), make_state()
    member = Membership(store, state)
    await member.start()
    state.core_alive = core_alive
    await member.stop()
    assert (await store.counts()).buried == int(not core_alive)


async def test_a_drain_is_not_undone_by_a_beat_that_was_under_way():
    class SlowStore(MemoryStore):
        """Takes its time with the first beat."""

        def __init__(self) -> None:
            super().__init__()
            self.begun, self.go_on = asyncio.Event(), asyncio.Event()

        async def heartbeat(self, worker_id: WorkerId, incarnation: Incarnation, load: NodeLoad) -> bool:
            if not self.begun.is_set():
                self.begun.set()
                await self.go_on.wait()
            return await super().heartbeat(worker_id, incarnation, load)

    store, state = SlowStore(), make_state()
    member = Membership(store, state)
    await member.start()
    first = asyncio.create_task(member.beat_once())
    await store.begun.wait()
    state.draining = True
    last = asyncio.create_task(member.beat_once())
    for _ in range(5):
        await asyncio.sleep(0)
    store.go_on.set()
    await asyncio.gather(first, last)
    assert [node.load.draining for node in await store.nodes()] == [True]
    await member.stop()


async def test_transitions_are_reported_again_in_order_when_the_registry_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(membership, "TRANSITIONS_PERIOD_S", 0.01)
    monkeypatch.setattr(membership, "MAX_TRANSITIONS", 3)
    store = TransitionStore()
    member = Membership(store, make_state())
    await member.start()
    store.is_there = False

    async def refused_again(before: int) -> bool:
        return store.num_refused > before

    for number in range(5):
        member.add_transitions([move(number)])
        before = store.num_refused
        await async_until(lambda before=before: refused_again(before))
    store.is_there = True

    async def is_told() -> bool:
        return bool(store.told)

    await async_until(is_told)
    await member.stop()
    assert store.told == [move(2), move(3), move(4)], "the oldest are of no use by then"
    assert len([record for record in caplog.records if "not reached the registry" in record.message]) == 1


def listed(
    name: str, role: WorkerRole = WorkerRole.DECODE, load: NodeLoad | None = None, alive: bool = True, **changes
) -> Node:
    return Node(info=node_info(worker_id=WorkerId(name), role=role, **changes), load=load or NodeLoad(), alive=alive)


def test_whoever_may_take_what_is_computed_here_is_met():
    me = node_info(worker_id=WorkerId("me"))
    nodes = [
        listed("decode"),
        listed("mixed", WorkerRole.MIXED),
        listed("prefill", WorkerRole.PREFILL),
        listed("dead", alive=False),
        listed("draining", load=NodeLoad(draining=True)),
        listed("of another layout", layout_id="other"),
    ]
    assert {ref.worker_id for ref in takers(me, nodes)} == {"decode", "mixed"}


def test_in_a_large_pool_nobody_is_met_beforehand():
    """Otherwise a decode worker would have to take the links of all prefill workers."""
    me = node_info(worker_id=WorkerId("me"))
    nodes = [listed(f"prefill-{number}", WorkerRole.PREFILL) for number in range(MAX_POOL - 1)]
    assert len(takers(me, [*nodes, listed("decode"), listed("dead", alive=False)])) == 1
    assert takers(me, [*nodes, listed("decode"), listed("decode-1")]) == []
    assert TransferSettings(secret=b"s").max_peers > MAX_POOL


def told_of(state: WorkerState) -> list[set[str]]:
    """Whom its core was told to meet, each time."""
    return [{ref.worker_id for ref in message.workers} for message in state.core.sent]  # type: ignore[attr-defined]


async def test_a_prefill_worker_tells_its_core_whom_to_meet_soon_after_they_join_and_with_each_beat(monkeypatch):
    monkeypatch.setattr(membership, "LOOK_PERIOD_S", 0.001)
    store, state = TransitionStore(), make_state()
    member = Membership(store, state)
    await member.start()
    await async_until(lambda: len(told_of(state)) > 2)  # it looks on
    await store.join(listed("d1").info)
    await async_until(lambda: told_of(state)[-1] == {"d1"})
    await asyncio.sleep(0.01)
    assert told_of(state).count({"d1"}) == 1, "from now on with each beat"
    await store.join(listed("d2").info)
    await member.beat_once()
    await member.stop()
    assert told_of(state)[-1] == {"d1", "d2"}


async def test_whoever_meets_nobody_looks_no_more_after_a_while(monkeypatch):
    """In a large pool, or one without decode workers, the beat has to do."""
    monkeypatch.setattr(membership, "LOOK_PERIOD_S", 0.0)
    monkeypatch.setattr(membership, "MAX_LOOKS", 3)
    state = make_state()
    member = Membership(MemoryStore(), state)
    await member.start()
    await async_until(lambda: len(told_of(state)) == 3)
    await asyncio.sleep(0.01)
    await member.stop()
    assert told_of(state) == [set()] * 3


async def test_a_registry_that_is_away_for_a_moment_ends_no_look(monkeypatch):
    monkeypatch.setattr(membership, "LOOK_PERIOD_S", 0.001)

    class Away(MemoryStore):
        num_away = 3

        async def nodes(self, at_most: int = 0) -> list[Node]:
            self.num_away -= 1
            if self.num_away >= 0:
                raise Unavailable("Redis does not answer")
            return await super().nodes(at_most)

    store, state = Away(), make_state()
    await store.join(listed("d1").info)
    member = Membership(store, state)
    await member.start()
    await async_until(lambda: told_of(state) == [{"d1"}])
    await member.stop()
    assert store.num_away == -1


async def test_a_list_of_workers_that_cannot_be_had_does_not_take_a_worker_out(monkeypatch):
    class Listless(MemoryStore):
        async def nodes(self, at_most: int = 0) -> list[Node]:
            raise Unavailable("Redis does not answer")

    state = make_state()
    member = Membership(Listless(), state)
    await member.start()
    await member.beat_once()
    await member.stop()
    assert state.joined and told_of(state) == []


@pytest.mark.parametrize("role", [WorkerRole.DECODE, WorkerRole.MIXED])
async def test_others_meet_nobody_beforehand(role: WorkerRole):
    store, state = MemoryStore(), make_state()
    state.info = msgspec.structs.replace(state.info, role=role)
    await store.join(listed("d1").info)
    member = Membership(store, state)
    await member.start()
    await asyncio.sleep(0)  # a look would have been had
    await member.beat_once()
    await member.stop()
    assert told_of(state) == []
