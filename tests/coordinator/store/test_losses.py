"""Redis loses a part of its state, by eviction or an operator's hand: within seconds all is right again."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from contracts.errors import RegistryError
from contracts.ids import Epoch, RequestId
from contracts.node import WorkerRole
from coordinator.placement.placer import Placer
from coordinator.reaper import Reaper
from coordinator.request_states import RequestState
from coordinator.store.local_server import RedisServer
from coordinator.store.redis_store import RedisStore
from coordinator.store.store import StateTransition
from tests.coordinator.coordinator_rig import (
    ALIVE_LOAD,
    answers,
    ask,
    assert_idle,
    credits,
    fresh_pool,
    node,
    pair,
    place,
)
from tests.coordinator.muting import muting
from tests.waiting import async_until

pytestmark = pytest.mark.slow

RIGHT = {"p0": (100, 1, 0, 0), "d0": (0, 0, 300, 2)}
"""The credits of `running` and `waiting`."""
NOTHING = (0, 0, 0, 0)
BEHIND = {
    "req:running": RIGHT | {"d0": (0, 0, 150, 1)},
    "req:waiting": {"p0": NOTHING, "d0": (0, 0, 150, 1)},
    "node:p0": RIGHT | {"p0": NOTHING},
    "node:d0": RIGHT | {"d0": NOTHING},
}
"""What is credited once such a key was lost: what is gone holds nothing."""


class Life:
    """What workers and gateways do all the time, but faster."""

    def __init__(self, store: RedisStore) -> None:
        self.store, self.placer = store, Placer(store)
        self.requests = [RequestId("running"), RequestId("waiting")]

    async def beat(self) -> None:
        infos = node("p0", WorkerRole.PREFILL), node("d0", WorkerRole.DECODE)
        while True:
            for info in infos:
                if not await self.store.heartbeat(info.worker_id, info.incarnation, ALIVE_LOAD):
                    await self.store.join(info, again=True)
            await self.store.renew(self.requests, 10.0)
            await asyncio.sleep(0.1)


@asynccontextmanager
async def living(server: RedisServer) -> AsyncIterator[Life]:
    """A pool with a request that is answered, and one that waits for its prompt."""
    store = RedisStore(server.url, fresh_pool())
    life, reaper = Life(store), Reaper(store)
    await pair(store)
    for name in life.requests:
        await place(store, ask(name))
    await store.advance([StateTransition(RequestId("running"), Epoch(1), RequestState.COMMITTED)])
    assert await credits(store) == RIGHT
    tasks = [asyncio.create_task(life.beat()), asyncio.create_task(reaper.run())]
    try:
        await async_until(lambda: reaper.is_leader)
        yield life
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await life.placer.close()
        await store.close()


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of the reaper takes a quarter of one."""
    monkeypatch.setattr("coordinator.reaper.PERIOD_S", 0.05)
    monkeypatch.setattr("coordinator.reaper.GRACE_S", 0.5)
    monkeypatch.setattr("coordinator.store.redis_store.ADOPTED_LEASE_MS", 1000)


KEYS = ["nodes", "node:p0", "node:d0", "touched", "req:running", "req:waiting", "leases", "states", "counters", "terms"]
KEYS += ["leader"]


def test_no_key_is_left_out() -> None:
    """Those that common.lua lists, but hints and the mark of a loss."""
    from coordinator.store.lua_scripts import FOLDER

    listed = set(re.findall(r"^--   (\w+)", (FOLDER / "common.lua").read_text(), re.M)) | {"counters"}
    assert listed - {"prefix", "held", "damaged"} == {key.partition(":")[0] for key in KEYS}


@pytest.mark.parametrize("key", KEYS)
async def test_each_key_in_turn(any_server: RedisServer, key: str) -> None:
    async with living(any_server) as life, Redis.from_url(any_server.url) as redis:
        store = life.store
        assert await redis.delete(f"{store.prefix}{key}") == 1

        async def is_right() -> bool:
            return await store.is_sound() and await credits(store) == BEHIND.get(key, RIGHT)

        await async_until(is_right)
        assert {worker.worker_id for worker in (n.info for n in await life.placer.nodes() if n.alive)} == {"p0", "d0"}
        assert await answers(store) == {"p0": 0, "d0": int(key not in ("req:running", "node:d0"))}
        route = await life.placer.place(ask("next", 10, 10))
        assert (route.prefill.worker_id, route.decode.worker_id) == ("p0", "d0")
        for request_id in (*life.requests, RequestId("next")):
            await store.finish(request_id, Epoch(1))
        await async_until(lambda: _is_idle(store))


async def test_requests_whose_gateway_went_with_their_leases_are_reaped(any_server: RedisServer) -> None:
    async with living(any_server) as life, Redis.from_url(any_server.url) as redis:
        life.requests = []
        assert await redis.delete(f"{life.store.prefix}leases") == 1
        await async_until(lambda: _is_idle(life.store))
        assert (await life.store.counts()).ended == {"FAILED": 2}


async def _is_idle(store: RedisStore) -> bool:
    try:
        await assert_idle(store)
    except AssertionError:
        return False
    return await store.is_sound()


async def test_a_command_whose_answer_is_lost_is_sent_twice_and_counts_once(any_server: RedisServer) -> None:
    """Redis' client would send it ten times more by itself."""
    async with muting(any_server.port) as (port, sent):
        store, there = RedisStore(f"redis://127.0.0.1:{port}/0", fresh_pool()), None
        there = RedisStore(any_server.url, store.prefix.split("{")[1].split("}")[0])
        await pair(store)
        await place(store, ask("warm"))
        placer = Placer(store)
        await placer.nodes()
        sent.clear()
        sent.append("mute")
        with pytest.raises(RegistryError):
            await placer.place(ask("r"))
        assert sent.count("EVALSHA") == 2
        sent.clear()
        assert (await credits(there))["p0"] == (200, 2, 0, 0)
        assert (await placer.place(ask("r"))).prefill.worker_id == "p0"
        assert (await credits(there))["p0"] == (200, 2, 0, 0)
        assert (await there.counts()).placed == 2
        for one in (placer, store, there):
            await one.close()
