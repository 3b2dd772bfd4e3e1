"""The balance of roles: who turns, when, and that it never turns to and fro."""

import asyncio

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.ids import WorkerId
from contracts.node import Node, NodeInfo, NodeLoad, WorkerRole
from coordinator.role_balance import HOLD_S, PAUSE_S, RoleBalance, RoleChange
from coordinator.role_balancer import RoleBalancer
from coordinator.store.store import WorkerView
from process.sockets import listen
from service.server import serving
from testing.memory_store import MemoryStore
from tests.coordinator.coordinator_rig import join, node
from tests.worker.fronts import make_state, make_status
from worker.front.app import make_app
from worker.front.membership import Membership
from worker.front.worker_state import WorkerState

PREFILL, DECODE, MIXED = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.MIXED
OBJECTIVE_S = 2.0
RATE = 1000.0


def worker(name: str, role: WorkerRole, *, pending: int = 0, reserved: int = 0, **load) -> WorkerView:
    """A worker of 10 000 tokens of KV that computes 1000 tokens of prompts a second."""
    stated = NodeLoad(prefill_rate=RATE, **load)
    return WorkerView(
        node=Node(info=node(name, role), load=stated, alive=True),
        pending_tokens=pending,
        num_prefills=0,
        reserved_tokens=reserved,
        num_decodes=0,
        num_answers=0,
    )


def pool(pending: int, reserved: int, prefills: int = 1, decodes: int = 2) -> list[WorkerView]:
    """A pool with so much of each on its first worker of a side."""
    first = [worker("p0", PREFILL, pending=pending), worker("d0", DECODE, reserved=reserved)]
    more = [worker(f"p{n}", PREFILL) for n in range(1, prefills)]
    return [*first, *more, *(worker(f"d{n}", DECODE) for n in range(1, decodes))]


def after_hold(workers: list[WorkerView]) -> RoleChange | None:
    balance = RoleBalance(OBJECTIVE_S)
    assert balance.decide(workers, 100.0) is None
    assert balance.decide(workers, 100.0 + HOLD_S - 0.1) is None
    return balance.decide(workers, 100.0 + HOLD_S)


def turned(change: RoleChange | None) -> tuple[str, WorkerRole] | None:
    return (change.worker.node.info.worker_id, change.role) if change else None


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        pytest.param(pool(2001, 5000), ("d1", PREFILL), id="prompts wait, decode has room"),
        pytest.param(pool(2000, 5000), None, id="not longer than the objective"),
        pytest.param(pool(9000, 5001), None, id="decode could not spare one"),
        pytest.param(pool(9000, 0, decodes=1), None, id="the only decode worker"),
        pytest.param(pool(0, 18_000, prefills=2), ("p0", DECODE), id="decode is full, no prompt waits"),
        pytest.param(pool(1001, 18_000, prefills=2), None, id="prefill could not spare one"),
        pytest.param(pool(0, 18_000), None, id="the only prefill worker"),
        pytest.param([*pool(9000, 0, decodes=1), worker("m", MIXED)], None, id="mixed workers stay"),
        pytest.param([worker("d0", DECODE), worker("d1", DECODE)], None, id="a side is missing: not a matter of load"),
        pytest.param([*pool(9000, 0), worker("d9", PREFILL, num_of_former_role=1)], None, id="one is still turning"),
        pytest.param(
            [*pool(9000, 0, decodes=1), worker("d1", DECODE, draining=True)], None, id="one that drains is none"
        ),
    ],
)
def test_a_worker_turns_when_one_side_is_short_and_the_other_can_spare_it(workers, expected):
    assert turned(after_hold(workers)) == expected


def test_a_burst_turns_nobody():
    balance = RoleBalance(OBJECTIVE_S)
    for second in range(100):
        workers = pool(9000 if second % int(HOLD_S) else 0, 0)
        assert balance.decide(workers, float(second)) is None


def test_after_a_change_the_roles_stay_for_a_while():
    balance = RoleBalance(OBJECTIVE_S)
    balance.decide(pool(9000, 0, decodes=3), 0.0)
    assert balance.decide(pool(9000, 0, decodes=3), HOLD_S) is not None
    balance.on_changed(HOLD_S)
    changes = [t for t in range(200) if balance.decide(pool(9000, 0, decodes=3), float(t) + HOLD_S)]
    assert changes[0] >= PAUSE_S


sides = st.lists(st.tuples(st.sampled_from([PREFILL, DECODE, MIXED]), st.integers(0, 20_000), st.integers(0, 12_000)))


@given(sides, st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_no_change_takes_the_last_of_a_side_nor_is_undone_by_the_next(drawn, gaps):
    """Whatever the load: it is given to the pool as it has become, again and again, and stays."""
    workers = [worker(f"w{n}", role, pending=p, reserved=r) for n, (role, p, r) in enumerate(drawn)]
    balance, now, changes = RoleBalance(OBJECTIVE_S), 0.0, list[tuple[WorkerId, WorkerRole]]()
    for gap in gaps:
        now += gap
        if change := balance.decide(workers, now):
            balance.on_changed(now)
            name = change.worker.node.info.worker_id
            assert (name, PREFILL if change.role is DECODE else DECODE) not in changes
            changes.append((name, change.role))
            workers = [with_role(w, change.role) if w.node.info.worker_id == name else w for w in workers]
            roles = {w.node.info.role for w in workers}
            assert {PREFILL, DECODE} <= roles


def with_role(view: WorkerView, role: WorkerRole) -> WorkerView:
    replace = msgspec.structs.replace
    return replace(view, node=replace(view.node, info=replace(view.node.info, role=role)))


class TestBalancer:
    """A balancer with fronts of workers that it reaches over HTTP."""

    async def test_it_turns_the_worker_and_the_registry_says_so(self):
        store = MemoryStore()
        roles = await self._balanced(store, secret="s3cret")
        assert roles == {"w": PREFILL, "x1": DECODE, "p0": PREFILL}
        assert (await store.counts()).role_changes == 1

    async def test_a_worker_that_refuses_is_left_alone_for_a_while(self, caplog: pytest.LogCaptureFixture):
        roles = await self._balanced(MemoryStore(), secret="another")
        assert roles == {"w": DECODE, "x1": DECODE, "p0": PREFILL}
        assert [record.message[:44] for record in caplog.records] == ["worker w does not turn to prefill: it answer"]

    async def _balanced(self, store: MemoryStore, secret: str) -> dict[str, WorkerRole]:
        """Return the roles after a short prefill was seen for longer than it takes."""
        state, listener = make_state(), listen("127.0.0.1", 0)
        membership = Membership(store, state)
        async with serving(make_app(state, membership.change_role, membership.change_adapters), listener):
            await self._join(store, state, f"http://127.0.0.1:{listener.getsockname()[1]}")
            balancer = RoleBalancer(store, secret, OBJECTIVE_S, lambda: True)
            async with aiohttp.ClientSession() as session:
                for second in range(int(HOLD_S) + 5):
                    await balancer.turn(session, 100.0 + second)
        return {n.info.worker_id: n.info.role for n in await store.nodes()}

    async def _join(self, store: MemoryStore, state: WorkerState, url: str) -> None:
        state.on_status(make_status(1))
        state.info = msgspec.structs.replace(state.info, role=DECODE, url=url)
        others: list[NodeInfo] = [node("p0", PREFILL), node("x1", DECODE)]
        await join(store, state.info, *others)
        busy = NodeLoad(prefill_rate=RATE, queue_tokens=9000)
        await store.heartbeat(others[0].worker_id, others[0].incarnation, busy)
        await asyncio.sleep(0)
