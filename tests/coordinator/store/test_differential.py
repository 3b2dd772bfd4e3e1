"""The scripts in Redis and the twin in memory agree: the same calls to store and twin give the same answers."""

import asyncio
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.errors import TandemError
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.node import NodeLoad, TransferCapabilities, WorkerRole
from coordinator.placement.prefixes import PromptPrefixes
from coordinator.request_states import ENDS, RequestState
from coordinator.store.local_server import RedisServer
from coordinator.store.redis_store import RedisStore
from coordinator.store.store import ClaimedWorker, MigrationClaim, StateTransition, Store, WorkerView
from testing.memory_store import MemoryStore
from tests.coordinator.coordinator_rig import answers, ask, credits, fresh_pool, node, place, read_pool
from tests.nodes import ways

WORKERS = [f"w{index}" for index in range(5)]
REQUESTS = [f"r{index}" for index in range(6)]
WAYS = [ways("l"), ways("l"), ways("m"), ways("l", "m"), ways("l", by="shm@a tcp"), ways("l", by="shm@ab ucx")]
WAYS += [ways("l", by="shm@a"), ways("l", "m", by="ucx tcp", memory="cuda"), ways("l", by="")]
EPOCHS = st.integers(1, 3)
RATES = st.one_of(st.just(0.0), st.floats(1.0, 1e6), st.sampled_from([float("nan"), float("inf"), -1.0]))
TOKENS = st.integers(0, 30_000)
BASE = [7] * 700
PROMPTS = st.tuples(st.integers(0, 600), st.integers(1, 2000)).map(lambda p: BASE[: p[0]] + [p[1]] * p[1])


@dataclass(frozen=True)
class Call:
    """One call on a store; `words` are its arguments."""

    name: str
    words: tuple

    async def on(self, store: Store) -> object:
        try:
            return await CALLS[self.name](store, *self.words)
        except TandemError as error:
            return type(error), str(error), getattr(error, "retry_after_s", None)


async def _join(
    store: Store,
    name: str,
    role: WorkerRole,
    incarnation: str,
    capacity: int,
    layout: str,
    ways: TransferCapabilities,
    longest: int,
    again: bool,
):
    options = {"incarnation": incarnation, "capacity": capacity, "layout_id": layout, "max_model_len": longest}
    return await store.join(node(name, role, **options, ways=ways), again)


async def _beat(store: Store, name: str, incarnation: str, load: NodeLoad):
    return await store.heartbeat(WorkerId(name), Incarnation(incarnation), load)


async def _leave(store: Store, name: str, incarnation: str, is_dead: bool):
    await store.leave(WorkerId(name), Incarnation(incarnation), is_dead)


async def _place(store: Store, name: str, epoch: int, prompt: list[int], max_tokens: int, exclude: list[str], g: str):
    options = {"exclude": tuple(exclude), "prefixes": PromptPrefixes(prompt), "gateway_id": GatewayId(g)}
    return await place(store, ask(name, len(prompt), max_tokens, epoch, **options))


async def _advance(store: Store, moves: list[tuple[str, int, RequestState]]):
    return await store.advance([StateTransition(RequestId(name), Epoch(epoch), to) for name, epoch, to in moves])


async def _finish(store: Store, name: str, epoch: int, state: RequestState):
    return await store.finish(RequestId(name), Epoch(epoch), state)


async def _renew(store: Store, names: list[str]):
    return await store.renew([RequestId(name) for name in names], 10.0)


async def _migrate(store: Store, name: str, epoch: int, worker: str, num_tokens: int):
    there = {view.node.info.worker_id: term for view, term in await _terms(store)}
    offered = ClaimedWorker(WorkerId(worker), there.get(WorkerId(worker), "0"), 10_000, 0.0, 6000.0)
    claim = MigrationClaim(request_id=RequestId(name), epoch=Epoch(epoch), worker=offered, need_tokens=num_tokens)
    return await store.claim_migration(claim)


async def _terms(store: Store) -> list[tuple[WorkerView, str]]:
    rows = {row.worker_id: row.counts for row in (await read_pool(store, 0, True)).rows}
    views = await store.workers()
    return [(v, counts.term) for v in views if (counts := rows.get(v.node.info.worker_id)) is not None]


async def _migrated(store: Store, name: str, epoch: int, is_moved: bool):
    return await store.end_migration(RequestId(name), Epoch(epoch), is_moved)


CALLS = {
    "migrate": _migrate,
    "migrated": _migrated,
    "join": _join,
    "beat": _beat,
    "leave": _leave,
    "place": _place,
    "advance": _advance,
    "finish": _finish,
    "renew": _renew,
}
names, incarnations = st.sampled_from(WORKERS), st.sampled_from(["a", "b"])
gateways = st.sampled_from(["g0", "g1"])
loads = st.builds(
    NodeLoad,
    num_running=st.integers(0, 3),
    queue_tokens=TOKENS,
    free_tokens=TOKENS,
    prompt_tokens_per_mixed_step=st.sampled_from([0, 64, 448, 20_000]),
    prefill_rate=RATES,
    decode_rate=RATES,
    transfer_rate=RATES,
    draining=st.sampled_from([False, False, False, True]),
    bad_paths=st.sampled_from([(), (), (Incarnation("a"),), (Incarnation("b"), Incarnation("a"))]),
)
joins = st.tuples(
    names,
    st.sampled_from(WorkerRole),
    incarnations,
    st.sampled_from([1000, 5000, 20_000]),
    st.sampled_from(["l", "l", "l", "m"]),
    st.sampled_from(WAYS),
    st.sampled_from([1500, 8192]),
    st.booleans(),
)
places = st.tuples(
    st.sampled_from(REQUESTS),
    EPOCHS,
    PROMPTS,
    st.one_of(st.just(1), st.integers(1, 5000)),
    st.lists(names, max_size=2),
    gateways,
)
moves = st.lists(st.tuples(st.sampled_from(REQUESTS), EPOCHS, st.sampled_from(RequestState)), max_size=4)
ends = st.tuples(st.sampled_from(REQUESTS), EPOCHS, st.sampled_from(sorted(ENDS)))


def called(name: str, words: st.SearchStrategy) -> st.SearchStrategy[Call]:
    return words.map(lambda words: Call(name, words))


calls = st.one_of(
    called("join", joins),
    called("beat", st.tuples(names, incarnations, loads)),
    called("leave", st.tuples(names, incarnations, st.booleans())),
    called("place", places),
    called("place", places),
    called("place", places),
    called("advance", st.tuples(moves)),
    called("finish", ends),
    called("migrate", st.tuples(st.sampled_from(REQUESTS), EPOCHS, names, st.integers(1, 3000))),
    called("migrated", st.tuples(st.sampled_from(REQUESTS), EPOCHS, st.booleans())),
    called("renew", st.tuples(st.lists(st.sampled_from(REQUESTS), max_size=4))),
)
starts = st.lists(joins, min_size=2, max_size=6).map(lambda rows: [Call("join", row) for row in rows])


async def compare(url: str, script: list[Call]) -> None:
    twin, store = MemoryStore(alive_s=60.0), RedisStore(url, fresh_pool(), alive_s=60.0)
    try:
        for call in script:
            assert await call.on(store) == await call.on(twin), call
            assert await credits(store) == await credits(twin), call
            assert await answers(store) == await answers(twin), call
        assert await store.counts() == await twin.counts()
        assert [node.info for node in await store.nodes()] == [node.info for node in await twin.nodes()]
    finally:
        await store.close()


def agree(server: RedisServer, script: list[Call]) -> None:
    asyncio.run(compare(server.url, script))


QUIET = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUIET
@given(st.tuples(starts, st.lists(calls, max_size=25)).map(lambda parts: parts[0] + parts[1]))
def test_the_scripts_do_as_the_twin(any_server: RedisServer, script: list[Call]) -> None:
    agree(any_server, script)
