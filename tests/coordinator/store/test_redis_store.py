"""What only a real server can show: atomicity, loss of everything, silence, and that nothing piles up."""

import asyncio
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from contracts.errors import ConfigError, Overloaded, RegistryError, TandemError, Unavailable
from contracts.ids import Epoch, Incarnation, RequestId, WorkerId
from contracts.node import WorkerRole
from coordinator.placement.policy import OVERCOMMIT
from coordinator.placement.prefixes import BLOCK_TOKENS, KEPT_S, PromptPrefixes
from coordinator.request_states import RequestState
from coordinator.store.connect import connect
from coordinator.store.local_server import RedisServer
from coordinator.store.redis_store import RedisStore
from coordinator.store.store import StateTransition, Store
from testing.memory_store import MemoryStore
from tests.coordinator.coordinator_rig import (
    ALIVE_LOAD,
    ask,
    assert_idle,
    credits,
    fresh_pool,
    join,
    node,
    pair,
    place,
    reap,
)
from tests.waiting import async_until

pytestmark = pytest.mark.slow


async def attempt(store: Store, name: str) -> bool:
    try:
        await place(store, ask(name, 300, 100))
    except Overloaded:
        return False
    return True


async def test_what_a_newer_release_counts_is_left_out(any_server: RedisServer):
    """One that was rolled back leaves it in Redis."""
    store = RedisStore(any_server.url, fresh_pool())
    await pair(store)
    await place(store, ask("r"))
    async with Redis.from_url(any_server.url) as redis:
        await redis.hincrby(f"{store.prefix}counters", "dodged", 1)
        await redis.hincrby(f"{store.prefix}states", "DREAMING", 1)
    counts = await store.counts()
    assert (counts.states, counts.placed) == ({"PLACED": 1}, 1)
    await store.close()


async def test_a_prefix_that_nobody_asked_for_lately_counts_no_more(any_server: RedisServer):
    """Each for itself."""
    store = RedisStore(any_server.url, fresh_pool())
    await pair(store)
    prompts = {name: PromptPrefixes([token] * 2 * BLOCK_TOKENS) for token, name in enumerate(("old", "young"))}
    for name, prompt in prompts.items():
        await place(store, ask(name, 2 * BLOCK_TOKENS + 10, prefixes=prompt))
        await store.finish(RequestId(name), Epoch(1))
    async with Redis.from_url(any_server.url) as redis:
        for digest in prompts["old"].looked_up:
            key = f"{store.prefix}prefix:".encode() + digest
            assert KEPT_S - 60 < await redis.ttl(key) <= KEPT_S
            assert await redis.pexpire(key, 0)
    for name, prompt in prompts.items():
        await place(store, ask(f"{name} again", 2 * BLOCK_TOKENS + 10, prefixes=prompt))
    assert (await credits(store))["p0"][0] == (2 * BLOCK_TOKENS + 10) + 10
    await store.close()


async def test_who_died_is_remembered_for_a_while_and_takes_nothing_meanwhile(any_server: RedisServer):
    """Though its sign of life be there: it has to join again, with nothing in its hands."""
    pool, kept_s = fresh_pool(), 60.0
    store = RedisStore(any_server.url, pool, stale_record_kept_s=kept_s)
    await pair(store)
    node_key = f"{store.prefix}node:d0"
    async with Redis.from_url(any_server.url) as redis:
        await redis.hset(node_key, "until", 0)
        await redis.zadd(f"{store.prefix}touched", {"d0": 0})
        for _ in range(2):
            await reap(store)
            assert await redis.hget(node_key, "died")
        await redis.hset(node_key, "until", 1 << 50)
        with pytest.raises(Unavailable):
            await place(store, ask("r"))
        await redis.hset(node_key, "until", 0)
        await redis.hincrby(node_key, "died", -int(kept_s * 1000))
        await reap(store)
        assert not await redis.exists(node_key)
    await store.close()


async def test_fifty_at_once_never_take_more_than_there_is(any_server: RedisServer):
    pool = fresh_pool()
    stores = [RedisStore(any_server.url, pool) for _ in range(5)]
    await pair(stores[0], capacity=1000)
    await stores[0].heartbeat(WorkerId("d0"), Incarnation("a"), ALIVE_LOAD)
    placed = await asyncio.gather(*(attempt(stores[index % 5], f"r{index}") for index in range(50)))
    assert sum(placed) == int(OVERCOMMIT * 1000) // 400
    assert await credits(stores[0]) == {"p0": (3000, 10, 0, 0), "d0": (0, 0, 4000, 10)}
    done = await asyncio.gather(
        *(stores[0].finish(RequestId(f"r{index}"), Epoch(1)) for index, is_placed in enumerate(placed) if is_placed)
    )
    assert all(done)
    await assert_idle(stores[0])
    await asyncio.gather(*(store.close() for store in stores))


async def test_whoever_is_cancelled_in_a_call_ends(redis_store: RedisStore):
    """In whichever turn of the event loop. Redis' client waits by `asyncio.wait_for`, which before Python 3.12 forgets
    a cancel that comes when what it waits for is done: a loop that asks the store would never end.
    """
    await redis_store.counts()  # connected, scripts known
    num_cancelled = 0
    for turns in itertools.count(1):
        asking = asyncio.create_task(redis_store.counts())
        for _ in range(turns):
            await asyncio.sleep(0)
        if not asking.cancel():
            break
        await asyncio.wait({asking})
        assert asking.cancelled(), f"cancelled after {turns} turns, and went on"
        num_cancelled += 1
    assert num_cancelled > 1  # as many turns as the answer's parts take to come
    assert (await redis_store.counts()).states == {}


async def test_one_of_many_leads(any_server: RedisServer):
    pool = fresh_pool()
    stores = [RedisStore(any_server.url, pool) for _ in range(4)]
    led = await asyncio.gather(*(store.lead(f"c{index}", 10.0) for index, store in enumerate(stores)))
    assert sum(led) == 1
    await asyncio.gather(*(store.close() for store in stores))


async def test_pools_do_not_see_each_other(any_server: RedisServer):
    one, two = (RedisStore(any_server.url, fresh_pool()) for _ in range(2))
    await pair(one)
    assert await two.nodes() == []
    await asyncio.gather(one.close(), two.close())


async def test_a_restarted_server_is_filled_again():
    """It has lost scripts, workers and requests; the same store object goes on."""
    with RedisServer() as server:
        store = RedisStore(server.url, fresh_pool())
        await pair(store)
        await place(store, ask("r"))
        server.stop()
        with pytest.raises(Unavailable, match="Redis does not answer"):
            await place(store, ask("s"))
        server.start()
        assert not await store.heartbeat(WorkerId("p0"), Incarnation("a"), ALIVE_LOAD)
        await pair(store)
        assert (await place(store, ask("s"))).prefill.worker_id == "p0"
        assert not await store.finish(RequestId("r"), Epoch(1))
        assert await store.finish(RequestId("s"), Epoch(1))
        await assert_idle(store)
        await store.close()


async def test_a_server_that_is_a_replica_now_is_left_for_the_one_that_its_name_leads_to():
    """After a failover behind a service's name, old connections lead to a server that takes no writes."""
    with RedisServer() as former, RedisServer() as latter:
        async with name_of(former, latter) as (url, fail_over):
            store = RedisStore(url, fresh_pool())
            await pair(store)
            assert await store.heartbeat(WorkerId("p0"), Incarnation("a"), ALIVE_LOAD)
            fail_over()
            async with Redis.from_url(former.url) as client:
                await client.replicaof("127.0.0.1", latter.port)  # type: ignore[misc]
            assert not await store.heartbeat(WorkerId("p0"), Incarnation("a"), ALIVE_LOAD)  # the latter is empty
            await pair(store)
            assert (await place(store, ask("r"))).prefill.worker_id == "p0"
            await store.close()


@asynccontextmanager
async def name_of(former: RedisServer, latter: RedisServer) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """An address, and what makes its new connections lead to the latter."""
    ports, connections = [former.port], []

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        there, back = await asyncio.open_connection("127.0.0.1", ports[-1])
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        url = f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield url, lambda: ports.append(latter.port)
        await asyncio.gather(*connections)


async def test_flushed_scripts_are_loaded_again(redis_store: RedisStore, any_server: RedisServer):
    await pair(redis_store)
    async with Redis.from_url(any_server.url) as client:
        await client.script_flush()
    assert await place(redis_store, ask("r"))


async def test_a_hung_server_is_given_up_in_words():
    with RedisServer() as server:
        store = RedisStore(server.url, fresh_pool())
        await store.ping()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(60):
                with pytest.raises(Unavailable, match="Redis does not answer"):
                    await store.nodes()
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await async_until(lambda: _pings(store))
        await store.close()


async def _pings(store: Store) -> bool:
    try:
        await store.ping()
    except Unavailable:
        return False
    return True


async def test_what_it_refuses_is_told_with_its_own_words(redis_store: RedisStore, any_server: RedisServer):
    async with Redis.from_url(any_server.url) as client:
        await client.rpush(f"{redis_store.prefix}leader", "another kind of value")  # type: ignore[misc]
    with pytest.raises(RegistryError, match=r"refused lead: .*WRONGTYPE") as error:
        await redis_store.lead("me", 1.0)
    assert error.value.what == "refuses"


@pytest.mark.parametrize("given", ["", ":wrong@", "nobody:secret@"])
async def test_a_wrong_password_is_a_refusal_and_no_silence(any_server: RedisServer, given: str):
    async with Redis.from_url(any_server.url) as client:
        await client.config_set("requirepass", "secret")
        store = RedisStore(any_server.url.replace("//", f"//{given}"), fresh_pool())
        with pytest.raises(RegistryError, match="wants another password, or user") as error:
            await store.ping()
        await client.config_set("requirepass", "")
    assert error.value.what == "refuses" and "secret" not in str(error.value)
    await store.close()


async def test_the_password_is_not_told():
    store = connect("redis://ann:secret@127.0.0.1:1/0", "p")
    with pytest.raises(Unavailable) as error:
        await store.ping()
    assert "secret" not in str(error.value) and "127.0.0.1:1" in str(error.value)
    await store.close()


def test_connect_refuses_nonsense():
    with pytest.raises(ConfigError, match="redis_url"):
        connect("http://here", "p")
    with pytest.raises(ConfigError, match="pool"):
        connect("redis://127.0.0.1", "{p}")


async def test_each_call_is_measured(any_server: RedisServer):
    seen: list[str] = []
    store = RedisStore(any_server.url, fresh_pool(), observe=lambda call, seconds: seen.append(call))
    await store.ping()
    await store.nodes()
    assert seen == ["ping", "workers"]
    await store.close()


async def keys_of(server: RedisServer, store: RedisStore) -> dict[str, int]:
    """Name without prefix -> time to live in ms, -1 for ever."""
    prefix = store.prefix
    async with Redis.from_url(server.url, decode_responses=True, encoding="latin-1") as client:
        names = [name async for name in client.scan_iter(match=f"{prefix}*".replace("[", "\\["), count=1000)]
        return {name.removeprefix(prefix): await client.pttl(name) for name in names}


async def test_what_has_ended_leaves_nothing_for_ever(redis_store: RedisStore, any_server: RedisServer):
    await pair(redis_store)
    for index in range(20):
        await place(redis_store, ask(f"r{index}", prefixes=PromptPrefixes([index] * BLOCK_TOKENS)))
        await redis_store.finish(RequestId(f"r{index}"), Epoch(1))
    keys = await keys_of(any_server, redis_store)
    lasting = {name for name, ttl_ms in keys.items() if ttl_ms == -1}
    assert lasting == {"nodes", "node:p0", "node:d0", "touched", "states", "counters", "terms"}
    await redis_store.join(node("p0", WorkerRole.PREFILL, incarnation="b"))
    for name, incarnation in (("p0", "b"), ("d0", "a")):
        await redis_store.leave(WorkerId(name), Incarnation(incarnation))
    keys = await keys_of(any_server, redis_store)
    assert {name for name, ttl_ms in keys.items() if ttl_ms == -1} == {"touched", "states", "counters", "terms"}
    assert not {name for name in keys if name.startswith("node:")}


async def test_long_batches_are_told_in_parts(redis_store: RedisStore):
    await pair(redis_store)
    await place(redis_store, ask("r"))
    moves = [StateTransition(RequestId("r"), Epoch(1), RequestState.QUEUED)] * 2500
    assert (await redis_store.advance(moves)).count(True) == 1
    assert (await redis_store.counts()).late == 2499


STEPS = ("place", "again", "advance", "finish", "reap", "leave", "join", "supersede")
WORKERS = {
    "p0": WorkerRole.PREFILL,
    "p1": WorkerRole.PREFILL,
    "d0": WorkerRole.DECODE,
    "d1": WorkerRole.DECODE,
    "m0": WorkerRole.MIXED,
}


class Life:
    """A random life of a pool, from a seed; in the end every request ends."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store, self.random = store, random.Random(seed)
        self.incarnations = dict.fromkeys(WORKERS, 0)
        self.epochs: dict[str, int] = {}

    async def live(self, steps: list[str]) -> None:
        for name in WORKERS:
            await self.join(name)
        for step in steps:
            try:
                await self.turn(step)
            except TandemError:
                continue  # a refusal is part of life
        await self.store.renew([RequestId(name) for name in self.epochs], 0.0)
        await reap(self.store)

    async def turn(self, step: str) -> None:
        worker = self.random.choice(list(WORKERS))
        match step:
            case "place":
                self.epochs[f"r{len(self.epochs)}"] = 1
                await self.place(f"r{len(self.epochs) - 1}")
            case "again" if self.epochs:
                request = self.request()
                self.epochs[request] += 1
                await self.place(request)
            case "advance" if self.epochs:
                states = self.random.choices(list(RequestState), k=3)
                await self.store.advance([self.move(self.request(), state) for state in states])
            case "finish" if self.epochs:
                request = self.request()
                await self.store.finish(RequestId(request), Epoch(self.epochs[request]))
            case "reap":
                await reap(self.store)
            case "leave":
                await self.store.leave(WorkerId(worker), Incarnation(str(self.incarnations[worker])))
            case "join":
                await self.join(worker)
            case "supersede":
                self.incarnations[worker] += 1
                await self.join(worker)

    def request(self) -> str:
        return self.random.choice(list(self.epochs))

    def move(self, request: str, state: RequestState) -> StateTransition:
        return StateTransition(RequestId(request), Epoch(self.epochs[request]), state)

    async def join(self, name: str) -> None:
        await join(self.store, node(name, WORKERS[name], incarnation=str(self.incarnations[name])))

    async def place(self, request: str) -> None:
        lease_s = self.random.choice([0.0, 60.0])
        num_tokens = self.random.randint(1, 3000)
        await place(self.store, ask(request, num_tokens, 500, self.epochs[request], lease_s=lease_s))


async def live(store: Store, seed: int, steps: list[str]) -> None:
    try:
        await Life(store, seed).live(steps)
        await assert_idle(store)
    finally:
        await store.close()


QUIET = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
lives = given(st.integers(0, 2**32), st.lists(st.sampled_from(STEPS), max_size=40))


@QUIET
@lives
def test_credits_never_leak(any_server: RedisServer, seed: int, steps: list[str]):
    asyncio.run(live(RedisStore(any_server.url, fresh_pool()), seed, steps))


@QUIET
@lives
def test_credits_never_leak_in_the_twin(seed: int, steps: list[str]):
    asyncio.run(live(MemoryStore(), seed, steps))
