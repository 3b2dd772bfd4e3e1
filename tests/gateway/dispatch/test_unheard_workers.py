"""A worker that hears its gateway and is not heard: what is placed on it fills it for nobody else."""

import asyncio
from collections.abc import AsyncIterator
from math import inf

import pytest

from contracts.ids import GatewayId, WorkerId
from contracts.node import NodeLoad, WorkerRole
from gateway.dispatch import worker_link
from testing.fake_worker import FakeWorker
from testing.memory_store import MemoryStore
from tests.gateway.gateway_rig import SECRET, Rig, coordinated

LONG = " ".join(["word"] * 900)


class UnheardWorker(FakeWorker):
    """A worker that nothing comes from any more, once it is cut off: neither events nor replies."""

    is_cut = False

    async def _jobs(self, request):
        reply = await super()._jobs(request)
        await self._reach()
        return reply

    async def _frames(self, gateway_id: GatewayId) -> AsyncIterator[bytes]:
        async for data in super()._frames(gateway_id):
            await self._reach()
            yield data

    async def _reach(self) -> None:
        while self.is_cut:
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds takes tenths of one."""
    monkeypatch.setattr(worker_link, "HEARTBEAT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(worker_link, "POST_TIMEOUT_S", 0.5)
    monkeypatch.setattr(worker_link, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr("testing.fake_worker.HEARTBEAT_S", 0.1)


async def ask(rig: Rig, count: int) -> list[int]:
    """Return the status of each of so many requests at once."""
    async with rig.client() as client:
        body = {"prompt": LONG, "max_tokens": 3}
        replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(count)))
    return [reply.status_code for reply in replies]


async def started(store: MemoryStore, workers: list[FakeWorker]) -> None:
    for worker in workers:
        load = NodeLoad(prefill_rate=100.0)  # it is full with 30 s of prompts: 3000 tokens, four of ours
        await store.heartbeat(worker.worker_id, worker.incarnation, load)


async def pending(store: MemoryStore) -> dict[str, int]:
    return {view.node.info.worker_id: view.pending_tokens for view in await store.workers()}


async def test_another_answers_all_that_was_placed_there_and_what_comes_later(checkpoint) -> None:
    store = MemoryStore(alive_s=inf)
    unheard = UnheardWorker(WorkerId("p0"), WorkerRole.PREFILL, SECRET)
    roles = {"p1": WorkerRole.PREFILL, "d1": WorkerRole.DECODE}
    others = [FakeWorker(WorkerId(name), role, SECRET) for name, role in roles.items()]
    async with coordinated(checkpoint, [unheard, *others], store) as rig:
        await started(store, [unheard, *others])
        assert await ask(rig, 2) == [200, 200]
        unheard.is_cut = True
        for _ in range(4):
            assert await ask(rig, 3) == [200] * 3
        assert await pending(store) == dict.fromkeys(("p0", "p1", "d1"), 0)
        unheard.is_cut = False
        await rig.until(lambda: len(rig.front.dispatch.workers.nodes) == 3)
        assert await ask(rig, 4) == [200] * 4


async def test_where_there_is_no_other_it_is_not_full_but_gone(checkpoint) -> None:
    store = MemoryStore(alive_s=inf)
    unheard = UnheardWorker(WorkerId("p0"), WorkerRole.PREFILL, SECRET)
    decode = FakeWorker(WorkerId("d0"), WorkerRole.DECODE, SECRET)
    async with coordinated(checkpoint, [unheard, decode], store) as rig:
        await started(store, [unheard, decode])
        unheard.is_cut = True
        for _ in range(3):
            assert await ask(rig, 4) == [503] * 4
            assert await pending(store) == {"p0": 0, "d0": 0}
        unheard.is_cut = False
        await rig.until(lambda: len(rig.front.dispatch.workers.nodes) == 2)
        assert await ask(rig, 4) == [200] * 4
