"""A gateway's view of the pool: what it reads, what it looks at, and that an old one does no harm."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from random import Random

import pytest
from msgspec.structs import replace

from contracts.errors import Overloaded, RegistryError, Unavailable
from contracts.ids import Epoch, Incarnation, RequestId, WorkerId
from contracts.node import NodeInfo, NodeLoad, WorkerRole
from contracts.request import AdapterRef
from coordinator.placement import policy
from coordinator.placement.candidate import Candidate
from coordinator.placement.placer import Placer
from coordinator.placement.pool_view import SHORTLIST, PoolView
from coordinator.placement.prefixes import BLOCK_TOKENS, Holder, PromptPrefixes
from coordinator.store.local_server import RedisServer
from coordinator.store.redis_store import MAX_ROWS, RedisStore
from coordinator.store.store import Claim, Claimed, PoolRow, PoolUpdate, Store, WorkerCounts
from testing.memory_store import MemoryStore
from tests.coordinator.coordinator_rig import ask, credits, fresh_pool, join, node, pair, read_pool, reap
from tests.nodes import ways

A = Incarnation("a")
IDLE = WorkerCounts(
    term="1",
    alive_until_ms=10_000,
    is_draining=False,
    pending_tokens=0,
    reserved_tokens=0,
    num_decodes=0,
    num_answers=0,
    num_served_blocks=0,
)
LOAD = NodeLoad(prefill_rate=1000.0, decode_rate=100.0, prompt_tokens_per_mixed_step=512)


def row(info: NodeInfo, term: int, load: NodeLoad = LOAD, **counts) -> PoolRow:
    return PoolRow(info.worker_id, replace(IDLE, term=str(term), **counts), load, info)


def view_of(*rows: PoolRow) -> PoolView:
    view = PoolView()
    assert take_in(view, PoolUpdate(now_us=1, rows=[*rows], is_full=True))
    return view


def take_in(view: PoolView, update: PoolUpdate) -> bool:
    """Take in a whole read."""
    view.begin_read()
    is_known = view.apply(update)
    view.end_read(update.is_full)
    return is_known


def names(found: list[Candidate]) -> list[str]:
    return [candidate.worker_id for candidate in found]


class TestShortlist:
    def test_its_size_does_not_depend_on_the_pools(self):
        view = view_of(*(row(node(f"w{i:04}", [*WorkerRole][i % 3]), i, pending_tokens=i) for i in range(2000)))
        assert len(view.shortlist(100, (), {}, 0)) <= 100

    def test_the_least_loaded_of_each_speed_are_looked_at(self):
        """A queue is another wait at another speed, and another prompt: none is the best for all."""
        slow = [row(node(f"s{i:02}", WorkerRole.PREFILL), 200 + i, pending_tokens=i) for i in range(40)]
        rate = replace(LOAD, prefill_rate=60_000.0)
        fast = [row(node(f"f{i:02}", WorkerRole.PREFILL), 40 + i, rate, pending_tokens=50_000) for i in range(40)]
        decode = row(node("d", WorkerRole.DECODE), 99)
        found = view_of(*slow, *fast, decode).shortlist(8000, (), {}, 0)
        assert {"s00", "f00", "d"} <= {*names(found)} and "s39" not in names(found)
        assert policy.choose(found, 8000, policy.decode_need(8000, 100))[0].prefill.worker_id == "f00"
        assert policy.choose(found, 20, policy.decode_need(20, 100))[0].prefill.worker_id == "s00"

    def test_a_holder_of_the_prefix_is_looked_at_whatever_its_load(self):
        rows = [row(node(f"p{i:03}", WorkerRole.PREFILL), i, pending_tokens=i) for i in range(200)]
        found = view_of(*rows, row(node("d", WorkerRole.DECODE), 999)).shortlist(
            700, (), {"150": Holder(10, 0, False)}, 0
        )
        (holder,) = (candidate for candidate in found if candidate.worker_id == "p150")
        assert holder.cached_tokens == 10 * BLOCK_TOKENS

    def test_a_prefix_is_gone_once_a_caches_worth_of_prompts_was_placed_behind_it(self):
        capacity = 400 * BLOCK_TOKENS
        for since, cached in ((399, 640), (400, 0)):
            rows = [row(node("m", WorkerRole.MIXED, capacity=capacity), 1, num_served_blocks=7 + since)]
            assert [c.cached_tokens for c in view_of(*rows).shortlist(700, (), {"1": Holder(10, 7, False)}, 0)] == [
                cached
            ]

    def test_those_that_can_exchange_kv_are_found_behind_those_that_can_not(self):
        shm = ways("l", by="shm@a")
        lonely = [row(node(f"p{i:03}", WorkerRole.PREFILL, ways=shm), i) for i in range(100)]
        lonely += [row(node(f"d{i:03}", WorkerRole.DECODE), 100 + i) for i in range(100)]
        late = row(node("p-late", WorkerRole.PREFILL), 300, pending_tokens=500)
        crowded = row(node("d-late", WorkerRole.DECODE, ways=shm), 301, num_decodes=9)
        found = view_of(*lonely, late, crowded).shortlist(100, (), {}, 0)
        assert {"p-late", "d-late"} <= {*names(found)}

    def test_of_a_prompt_that_fits_nobody_the_longest_that_does_is_told(self):
        rows = [row(node(f"m{i}", WorkerRole.MIXED, max_model_len=100 * i), i) for i in range(1, 60)]
        assert names(view_of(*rows).shortlist(9000, (), {}, 0)) == ["m59"]

    def test_who_drains_died_or_refused_is_not_looked_at(self):
        rows = [
            row(node("dead", WorkerRole.MIXED), 0),
            row(node("silent", WorkerRole.MIXED), 1, alive_until_ms=0),
            row(node("draining", WorkerRole.MIXED), 2, is_draining=True),
            row(node("refuser", WorkerRole.MIXED), 3),
            row(node("other", WorkerRole.MIXED), 4),
        ]
        assert names(view_of(*rows).shortlist(10, {WorkerId("refuser")}, {}, 0)) == ["other"]

    def test_a_queue_gets_shorter_while_nothing_is_read(self):
        rows = [row(node("a", WorkerRole.MIXED), 1, pending_tokens=1000)]
        view = view_of(*rows, row(node("b", WorkerRole.MIXED), 2, pending_tokens=300))
        seen = [[c.pending_tokens for c in view.shortlist(10, (), {}, now_ms)] for now_ms in (0, 200, 500, 5000)]
        assert seen == [[1000, 300], [800, 100], [500, 0], [0, 0]]
        view.update_counts(WorkerId("b"), replace(IDLE, term="2", pending_tokens=900), 500)
        assert [c.pending_tokens for c in view.shortlist(10, (), {}, 800)] == [200, 600]

    def test_of_many_that_wait_for_work_not_all_requests_look_at_the_same(self):
        view = view_of(*(row(node(f"m{i:03}", WorkerRole.MIXED), 1 + i) for i in range(100)))
        looks = [{*names(view.shortlist(10, (), {}, 1, salt))} for salt in (0, 40, 60)]
        assert len(set.union(*looks)) > 2 * SHORTLIST

    def test_who_falls_silent_is_looked_at_no_more(self):
        view = view_of(row(node("m", WorkerRole.MIXED), 1))
        assert names(view.shortlist(10, (), {}, 0)) == ["m"]
        take_in(view, PoolUpdate(now_us=10_000_000, rows=[], is_full=False))
        assert view.shortlist(10, (), {}, 0) == [] and [one.alive for one in view.nodes] == [False]


class CountingStore(MemoryStore):
    """Counts how often the pool is read; `is_away`: reads fail."""

    num_reads, is_away = 0, False

    async def pool(self, since_us: int, is_full: bool) -> AsyncGenerator[PoolUpdate, None]:
        self.num_reads += 1
        if self.is_away:
            raise RegistryError("Redis does not answer", "does not answer")
        async for part in super().pool(since_us, is_full):
            yield part


class TestSource:
    """The worker that is asked for the KV of a prompt which its prefill worker does not have."""

    def source(self, *holders: tuple[str, Holder], num_served_blocks: int = 0) -> str | None:
        """Return who it is, beside a prefill worker "1" that holds ten blocks; "2" is of the other layout."""
        rows = [row(node("1", WorkerRole.PREFILL), 1), row(node("3", WorkerRole.PREFILL), 3)]
        rows += [row(node("4", WorkerRole.DECODE), 4, num_served_blocks=num_served_blocks)]
        rows += [row(replace(node("2", WorkerRole.DECODE), layout_id="other"), 2)]
        view = view_of(*rows)
        (prefill,) = [c for c in view.shortlist(700, (), {"1": Holder(10, 0, True)}, 0) if c.worker_id == "1"]
        found = view.source(prefill, dict(holders))
        return found and found.worker_id

    def test_it_is_who_holds_the_most(self):
        assert self.source(("1", Holder(10, 0, True)), ("3", Holder(12, 0, False)), ("4", Holder(11, 0, True))) == "3"

    def test_nobody_is_asked_for_what_the_prefill_worker_has(self):
        assert self.source(("1", Holder(10, 0, True)), ("3", Holder(10, 0, True)), ("4", Holder(10, 0, False))) is None
        assert self.source(("1", Holder(12, 0, True))) is None

    def test_who_decoded_the_answer_before_has_that_too(self):
        assert self.source(("3", Holder(10, 0, True)), ("4", Holder(10, 0, True))) == "4"

    def test_what_was_evicted_or_is_of_another_layout_is_no_use(self):
        assert self.source(("4", Holder(12, 0, True)), num_served_blocks=10**6) is None
        assert self.source(("2", Holder(12, 0, True)), ("9", Holder(12, 0, True))) is None


class TestPlacer:
    """`clock` is the gateway's; the store has its own."""

    def setup_method(self) -> None:
        self.now = 0.0
        self.store = CountingStore(alive_s=600.0)
        self.placer = Placer(self.store, lambda: self.now)

    async def test_a_burst_reads_the_pool_once(self):
        await pair(self.store)
        await asyncio.gather(*(self.placer.place(ask(f"r{i}")) for i in range(20)))
        assert self.store.num_reads == 1

    async def test_it_reads_on_beside_placements_and_waits_only_for_an_old_view(self):
        await pair(self.store)
        await self.placer.place(ask("a"))
        self.now = 0.5
        self.store.is_away = True
        await self.placer.place(ask("b"))
        await asyncio.sleep(0)
        assert self.store.num_reads == 2
        self.now = 1.5
        with pytest.raises(Unavailable, match="does not answer"):
            await self.placer.place(ask("c"))
        await self.placer.close()

    async def test_nobody_is_refused_by_an_old_view(self):
        await self.store.join(node("p0", WorkerRole.PREFILL))
        with pytest.raises(Unavailable, match="decode"):
            await self.placer.place(ask("a"))
        self.now = 0.1
        await self.store.join(node("d0", WorkerRole.DECODE))
        assert (await self.placer.place(ask("b"))).decode.worker_id == "d0"

    async def test_who_left_or_drains_since_the_view_was_read_is_passed_over_by_the_store(self):
        await join(self.store, *(node(f"m{i}", WorkerRole.MIXED) for i in range(9)))
        await self.placer.place(ask("a"))
        for i in range(4):
            await self.store.leave(WorkerId(f"m{i}"), A)
        for i in range(4, 8):
            await self.store.heartbeat(WorkerId(f"m{i}"), A, NodeLoad(draining=True))
        assert (await self.placer.place(ask("b"))).prefill.worker_id == "m8"

    async def test_who_joined_anew_since_is_not_taken_for_who_it_was(self):
        await self.store.join(node("m", WorkerRole.MIXED))
        await self.placer.place(ask("a"))
        await self.store.join(node("m", WorkerRole.MIXED, incarnation="b"))
        assert (await self.placer.place(ask("b"))).prefill.incarnation == "b"

    async def test_a_refusal_is_counted_once(self):
        with pytest.raises(Unavailable):
            await self.placer.place(ask("a"))
        await pair(self.store, capacity=60)
        self.now = 2.0
        await self.placer.place(ask("b", 50, 5000))
        with pytest.raises(Overloaded):
            await self.placer.place(ask("c", 50, 5000))
        counts = await self.store.counts()
        assert (counts.unavailable, counts.placed, counts.overloaded) == (1, 1, 1)

    async def test_two_gateways_that_see_the_same_do_not_choose_the_same(self):
        """The store decides by fresh counts, since neither view knows what the other gateway placed."""
        await join(self.store, *(node(f"m{i}", WorkerRole.MIXED) for i in range(4)))
        other = Placer(self.store, lambda: self.now)
        routes = [await (self.placer, other)[i % 2].place(ask(f"r{i}", 1000)) for i in range(8)]
        assert {*Counter(route.prefill.worker_id for route in routes).values()} == {2}


async def test_a_large_pool_is_read_in_parts(any_server: RedisServer):
    store = RedisStore(any_server.url, fresh_pool())
    infos = [node(f"w{i:04}", WorkerRole.MIXED) for i in range(2 * MAX_ROWS + 3)]
    await join(store, *infos)
    for is_full in (True, False):
        update = await read_pool(store, 0, is_full)
        assert sorted(row.worker_id for row in update.rows) == [info.worker_id for info in infos]
        assert all(row.info is not None for row in update.rows)
    assert await store.heartbeat(WorkerId("w0007"), A, LOAD)
    (changed,) = (await read_pool(store, update.now_us + 1, False)).rows
    assert (changed.worker_id, changed.load, changed.info) == ("w0007", LOAD, None)
    await store.leave(WorkerId("w0007"), A)
    assert PoolRow(WorkerId("w0007"), None) in (await read_pool(store, update.now_us + 1, False)).rows
    await store.close()


async def test_views_that_follow_the_changes_know_what_the_pool_is(any_server: RedisServer):
    """After any life of the pool, as one that reads all of it."""
    store, random = RedisStore(any_server.url, fresh_pool()), Random(1)
    view, since_us = PoolView(), 0
    for step in range(300):
        name = f"w{random.randrange(8)}"
        match random.randrange(5):
            case 0:
                await store.join(node(name, random.choice([*WorkerRole]), incarnation=random.choice("ab")))
            case 1:
                load = replace(LOAD, queue_tokens=random.randrange(9), draining=random.random() < 0.2)
                await store.heartbeat(WorkerId(name), A, load)
            case 2:
                await store.leave(WorkerId(name), A)
            case 3:
                try:
                    await Placer(store).place(ask(f"r{step}"))
                except (Unavailable, Overloaded):
                    continue
            case 4:
                await store.finish(RequestId(f"r{random.randrange(step + 1)}"), Epoch(1))
        update = await read_pool(store, since_us, False)
        assert take_in(view, update)
        since_us = update.now_us
    fresh = PoolView()
    take_in(fresh, await read_pool(store, 0, True))
    assert view.nodes == fresh.nodes and view.nodes
    assert view.shortlist(100, (), {}, 0) == fresh.shortlist(100, (), {}, 0)
    await store.close()


async def test_credits_of_an_idle_worker_do_not_fill_it(store: Store):
    """Its gateway does not hear it, perhaps; the prompts never came, or are done."""
    await pair(store, capacity=1_000_000)
    idle = replace(LOAD, free_tokens=1_000_000)
    await store.heartbeat(WorkerId("p0"), A, idle)
    for index in range(4):
        await Placer(store).place(ask(f"r{index}", 8000))
    with pytest.raises(Overloaded, match="prefill"):
        await Placer(store).place(ask("s", 8000))
    for _ in range(2):
        await store.heartbeat(WorkerId("p0"), A, idle)
    await Placer(store).place(ask("s", 8000))
    assert (await credits(store))["p0"] == (5 * 8000, 5, 0, 0)
    busy = replace(idle, num_waiting=1, queue_tokens=8000, free_tokens=2000)
    await store.heartbeat(WorkerId("p0"), A, busy)
    with pytest.raises(Overloaded, match="prefill"):
        await Placer(store).place(ask("t", 8000))


async def test_a_claim_that_comes_twice_takes_credit_once(store: Store):
    """Its answer was lost, and Redis' client, or the gateway, asked again."""
    claims: list[tuple[Claim, list[tuple[bytes, bytes]]]] = []
    await pair(store)
    take = store.claim

    async def noted(claim: Claim, those: list[tuple[bytes, bytes]]) -> Claimed:
        claims.append((claim, those))
        return await take(claim, those)

    store.claim = noted  # type: ignore[method-assign, assignment]
    route = await Placer(store).place(ask("r", 640, prefixes=PromptPrefixes(list(range(640)))))
    again = await take(*claims[-1])
    assert again.repeated == (route.prefill, route.decode)
    assert (await credits(store))["d0"][3] == 1
    assert await reap(store) == []


async def test_reading_changes_ends_in_a_pool_that_changes_as_fast(any_server: RedisServer, monkeypatch):
    """All workers beat between one page and the next: what changed since the first is for the next read."""
    pool, num_pages = fresh_pool(), 0
    store, workers = RedisStore(any_server.url, pool), RedisStore(any_server.url, pool)
    infos = [node(f"w{i:04}", WorkerRole.MIXED) for i in range(2 * MAX_ROWS + 3)]
    await join(store, *infos)
    since_us, run = (await read_pool(store, 0, True)).now_us, store._run

    async def run_and_beat(name: str, *args: str | int | bytes):
        nonlocal num_pages
        num_pages += 1
        assert num_pages < 20
        page = await run(name, *args)
        for info in infos:
            await workers.heartbeat(info.worker_id, A, LOAD)
        return page

    monkeypatch.setattr(store, "_run", run_and_beat)
    for info in infos:
        await workers.heartbeat(info.worker_id, A, LOAD)
    update = await read_pool(store, since_us, False)
    assert len({row.worker_id for row in update.rows}) >= MAX_ROWS and num_pages < 5
    await store.close()
    await workers.close()


async def test_a_worker_whose_role_changed_is_offered_for_its_new_side_alone(redis: RedisServer) -> None:
    """A placer that knew it before reads so in the changes, and its credits stay."""
    store = RedisStore(redis.url, fresh_pool())
    placer = Placer(store, clock := _Clock())
    await join(store, node("a0", WorkerRole.DECODE), node("a1", WorkerRole.DECODE), node("p0", WorkerRole.PREFILL))
    routes = [await placer.place(ask(f"r{n}")) for n in range(4)]
    assert {route.prefill.worker_id for route in routes} == {"p0"}
    assert {route.decode.worker_id for route in routes} == {"a0", "a1"}
    adapters = (AdapterRef("sql", b"x" * 16),)
    await store.restate(replace(node("a0", WorkerRole.PREFILL), adapters=adapters))
    clock.now += 0.5
    assert [each.info.adapters for each in await placer.nodes()] == [adapters, None, None]
    later = [await placer.place(ask(f"s{n}")) for n in range(4)]
    assert "a0" in {route.prefill.worker_id for route in later}
    assert {route.decode.worker_id for route in later} == {"a1"}
    assert any((await credits(store))["a0"])
    await placer.close()
    await store.close()


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now
