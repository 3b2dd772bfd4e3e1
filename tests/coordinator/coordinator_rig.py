"""Workers and requests of a few words, and what must hold when nothing runs."""

import secrets

import pytest
from msgspec.structs import replace

from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.node import NodeInfo, NodeLoad, WorkerRole
from contracts.request import Route
from coordinator.placement.placer import Placer, PlaceRequest
from coordinator.store.store import PoolUpdate, Reaped, Store, WorkerView
from tests.nodes import ways

GATEWAY = GatewayId("g0")
ALIVE_LOAD = NodeLoad(prefill_rate=1000.0, decode_rate=100.0)


BREAK_EVEN_RATE = 20_000.0
"""Tokens of prompts a second of the workers of BREAK_EVENS."""
BREAK_EVEN_STEP = 512
"""Tokens of their steps: those of prompts and one of each answer."""
BREAK_EVENS = [
    pytest.param(0, 1e6, 0, 8000, None, id="nobody to spare"),
    pytest.param(1, 1e6, 0, 313, 314, id="one answer"),
    pytest.param(2, 1e6, 0, 156, 157, id="two answers"),
    pytest.param(8, 1e6, 0, 39, 40, id="eight answers"),
    pytest.param(2, 15_000.0, 0, 328, 329, id="a link that computing does not hide"),
    pytest.param(2, 12_000.0, 0, 8000, None, id="a link that costs more than the answers' stop"),
    pytest.param(2, 1e6, 1000, 1725, 1726, id="a queue at prefill"),
]
"""Answers that run on a mixed worker, tokens a second of a prefill worker's link, tokens that wait there; then the
longest prompt that the mixed worker computes, and the shortest that is computed on the prefill worker and moved:
HANDOFF_S + wait = n * (weight * answers / rate - max(0, 1 / link - 1 / rate)), by docs/placement.md.
"""


def fresh_pool() -> str:
    return f"test-{secrets.token_hex(6)}"


def node(name: str, role: WorkerRole, *, incarnation: str = "a", capacity: int = 10_000, **options) -> NodeInfo:
    layout = options.get("layout")
    layout_id = "l" if layout is None else layout.layout_id
    facts = {"layout_id": layout_id, "max_model_len": 8192, "ways": ways(layout_id)} | options
    return NodeInfo(
        worker_id=WorkerId(name),
        incarnation=Incarnation(incarnation),
        role=role,
        url=f"http://{name}:1",
        transfer=f"{name}:2",
        model="m",
        capacity_tokens=capacity,
        version="0",
        pid=1,
        core_pid=2,
        **facts,
    )


async def join(store: Store, *infos: NodeInfo) -> None:
    for info in infos:
        await store.join(info)


async def pair(store: Store, **options) -> None:
    """p0 and d0."""
    await join(store, node("p0", WorkerRole.PREFILL, **options), node("d0", WorkerRole.DECODE, **options))


def ask(name: str, num_tokens: int = 100, max_tokens: int = 50, epoch: int = 1, **options) -> PlaceRequest:
    facts = {"gateway_id": GATEWAY, "lease_s": 10.0} | options
    return PlaceRequest(
        request_id=RequestId(name), epoch=Epoch(epoch), num_tokens=num_tokens, max_tokens=max_tokens, **facts
    )


async def place(store: Store, request: PlaceRequest) -> Route:
    """Place as a gateway does that has just started and knows nothing but what it reads now."""
    placer = Placer(store)
    try:
        return await placer.place(request)
    finally:
        await placer.close()


async def read_pool(store: Store, since_us: int, is_full: bool) -> PoolUpdate:
    """Return all parts of a read as one, with what came last of each worker."""
    parts = [part async for part in store.pool(since_us, is_full)]
    rows = {row.worker_id: row for part in parts for row in part.rows}
    assert {part.now_us for part in parts} == {parts[0].now_us}
    return replace(parts[0], rows=[*rows.values()])


async def view(store: Store, name: str) -> WorkerView:
    return next(worker for worker in await store.workers() if worker.node.info.worker_id == name)


async def credits(store: Store) -> dict[str, tuple[int, int, int, int]]:
    """Worker -> pending tokens, prefills, reserved tokens, decodes."""
    return {
        worker.node.info.worker_id: (
            worker.pending_tokens,
            worker.num_prefills,
            worker.reserved_tokens,
            worker.num_decodes,
        )
        for worker in await store.workers()
    }


async def answers(store: Store) -> dict[str, int]:
    """Worker -> those it decodes whose prompts are computed."""
    return {worker.node.info.worker_id: worker.num_answers for worker in await store.workers()}


async def assert_idle(store: Store) -> None:
    assert set((await credits(store)).values()) <= {(0, 0, 0, 0)}
    assert set((await answers(store)).values()) <= {0}
    assert (await store.counts()).states == {}


async def reap(store: Store) -> list[Reaped]:
    """Reap as the leader, which nobody else is."""
    assert await store.lead("reaper", 60.0)
    return await store.reap("reaper")
