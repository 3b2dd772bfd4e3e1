"""Placement credits what tiers and other workers hold of a prompt, by what loading it costs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from redis.asyncio import Redis

from contracts.hashing import block_key, chain_hashes, salted
from contracts.held_prefixes import HeldChange
from contracts.ids import Incarnation, WorkerId
from contracts.layout import KVLayout
from contracts.node import NodeInfo, NodeLoad, TierSpeed, WorkerRole
from coordinator.placement import policy
from coordinator.placement.candidate import Candidate, HeldPrefix
from coordinator.placement.placer import Placer
from coordinator.placement.policy import decode_need
from coordinator.placement.pool_view import MAX_FORMS, PoolView
from coordinator.placement.prefixes import BLOCK_TOKENS, Holder, KVForm, PromptPrefixes, tier_depths
from coordinator.placement.reuse import with_load
from coordinator.store.local_server import RedisServer
from coordinator.store.redis_store import RedisStore
from coordinator.store.store import MAX_HELD_BY, PoolRow, PoolUpdate, Store
from testing.memory_store import MemoryStore
from tests.coordinator.coordinator_rig import ask, credits, node
from tests.coordinator.placement.test_policy import D, P, worker
from tests.coordinator.placement.test_pool_view import row, view_of
from tests.nodes import ways

N = 4096
NEED = decode_need(N, 100)
LAYOUT = KVLayout.uniform(model="m", num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype="float32")
FORM = KVForm(LAYOUT.shared_id, LAYOUT.block_size)
A = Incarnation("a")
HOST, DISK, STORE = (TierSpeed(tier, 50_000.0, 0.002) for tier in ("host", "disk", "store"))


def held(
    num_tokens: int, tokens_per_s: float = 50_000.0, latency_s: float = 0.002, is_peer: bool = False
) -> HeldPrefix:
    return HeldPrefix(num_tokens, tokens_per_s, latency_s, is_peer)


held_prefixes = st.builds(HeldPrefix, st.integers(1, 8000), st.floats(1.0, 1e6), st.floats(0.0, 2.0), st.booleans())


class TestLoad:
    """What a candidate is expected to load: `with_load`."""

    @given(st.lists(held_prefixes, max_size=5), st.integers(0, N - 1), st.floats(1.0, 1e5))
    def test_it_never_costs_more_than_computing_and_counts_no_token_twice(self, those, cached, rate) -> None:
        before = replace(P, cached_tokens=cached, prefill_rate=rate, held=tuple(those))
        after = with_load(before, N)
        assert 1 <= after.uncached_tokens(N) == N - cached - after.loaded_tokens <= N - cached
        assert after.loaded_tokens / rate >= after.load_s >= 0.0
        end = cached + after.loaded_tokens
        assert end == cached or end <= max(prefix.num_tokens for prefix in those)
        if after.loaded_tokens:
            assert after.load_s >= min(prefix.latency_s for prefix in those if prefix.num_tokens > cached)

    @given(st.lists(held_prefixes, min_size=1, max_size=4), st.integers(0, N - 1), held_prefixes)
    def test_one_more_holder_makes_it_no_dearer(self, those, cached, another) -> None:
        """A fast one that has little may come before a slow one with more, so the sum of both is what counts."""
        fast = replace(another, tokens_per_s=1e6, latency_s=0.0, num_tokens=8000)
        costs = [
            policy._ready_s(with_load(replace(P, cached_tokens=cached, held=tuple(some)), N), N)
            for some in (those, [*those, fast])
        ]
        assert costs[1] <= costs[0] + 1e-9

    def test_what_the_cache_has_is_not_loaded(self) -> None:
        found = with_load(replace(P, cached_tokens=2048, held=(held(2048), held(1024))), N)
        assert (found.loaded_tokens, found.load_s) == (0, 0.0)
        found = with_load(replace(P, cached_tokens=2048, held=(held(3072),)), N)
        assert (found.loaded_tokens, found.load_s) == (1024, pytest.approx(0.002 + 1024 / 50_000))

    def test_two_tiers_give_each_its_part(self) -> None:
        """The disk only what is beyond that of the memory."""
        found = with_load(replace(P, held=(held(3072, 10_000.0, 0.01), held(1024, 100_000.0, 0.0))), N)
        assert found.loaded_tokens == 3072
        assert found.load_s == pytest.approx(1024 / 100_000 + 0.01 + 2048 / 10_000)

    def test_a_slow_part_is_computed_where_that_is_faster(self) -> None:
        found = with_load(replace(P, held=(held(3072, 500.0), held(1024, 100_000.0, 0.0))), N)
        assert (found.loaded_tokens, found.load_s) == (1024, pytest.approx(1024 / 100_000))

    def test_all_that_is_held_of_a_prompt_leaves_its_last_token(self) -> None:
        assert with_load(replace(P, held=(held(8000),)), N).loaded_tokens == N - 1

    def test_a_pull_is_all_of_it_and_no_sum_with_own_tiers(self) -> None:
        """A worker asks the other one for all that its cache lacks."""
        peer = held(3072, 20_000.0, is_peer=True)
        found = with_load(replace(P, held=(held(1024, 25_000.0, 0.0), peer)), N)
        assert (found.loaded_tokens, found.is_pulled) == (3072, True)
        assert found.load_s == pytest.approx(0.002 + 3072 / 20_000)
        assert not with_load(replace(P, held=(held(3072, 25_000.0, 0.0), peer)), N).is_pulled


def computes(*found: Candidate) -> tuple[str, int]:
    """Return who computes a prompt, and how many tokens of it."""
    best = policy.choose([*found, D], N, NEED)[0]
    return best.prefill.worker_id, best.uncached_tokens


class TestChoice:
    """Prefill computes 1000 tokens a second; a tier that holds 4032 of 4096 tokens saves 3.95 s."""

    HOLDER = worker("p1", WorkerRole.PREFILL, held=(held(4032),))

    def test_whose_memory_holds_the_prompt_gets_it(self) -> None:
        assert computes(P, self.HOLDER) == ("p1", 64)

    def test_a_queue_as_long_as_the_load_saves_is_no_longer_worth_it(self) -> None:
        saved_s = 4032 / 1000 - (0.002 + 4032 / 50_000)
        for queue, chosen in ((int(saved_s * 1000) - 1, "p1"), (int(saved_s * 1000) + 2, "p0")):
            assert computes(P, replace(self.HOLDER, pending_tokens=queue))[0] == chosen

    def test_a_cache_is_better_than_a_tier_and_a_fast_tier_better_than_a_slow_one(self) -> None:
        disk = worker("p2", WorkerRole.PREFILL, held=(held(4032, 5000.0),))
        cache = worker("p9", WorkerRole.PREFILL, cached_tokens=4032)
        assert computes(disk, self.HOLDER)[0] == "p1"
        assert computes(self.HOLDER, cache)[0] == "p9"

    def test_a_tier_slower_than_computing_is_worth_nothing(self) -> None:
        slow = worker("p1", WorkerRole.PREFILL, held=(held(4032, 900.0),))
        assert computes(P, slow) == ("p0", N)

    def test_what_all_have_in_a_shared_store_leaves_the_choice_to_the_queues(self) -> None:
        other = worker("p2", WorkerRole.PREFILL, held=(held(4032),), pending_tokens=100)
        assert computes(other, self.HOLDER) == ("p1", 64)
        assert computes(replace(other, pending_tokens=0), replace(self.HOLDER, pending_tokens=100)) == ("p2", 64)

    @given(st.integers(0, 4032), st.integers(0, 6000), st.floats(100.0, 1e6))
    def test_between_two_the_sum_decides(self, num_tokens: int, queue: int, rate: float) -> None:
        holder = worker("p1", WorkerRole.PREFILL, held=(held(num_tokens, rate, 0.0),), pending_tokens=queue)
        plain_s = N / 1000
        loaded_s = min(plain_s, num_tokens / rate + (N - num_tokens) / 1000) + queue / 1000
        if abs(loaded_s - plain_s) > 1e-6:
            assert computes(P, holder)[0] == ("p1" if loaded_s < plain_s else "p0")


def with_tiers(name: str, role: WorkerRole = WorkerRole.PREFILL, **options) -> NodeInfo:
    return node(name, role, layout=LAYOUT, **options)


def load(*tiers: TierSpeed) -> NodeLoad:
    return NodeLoad(prefill_rate=1000.0, decode_rate=100.0, prompt_tokens_per_mixed_step=512, tiers=tiers)


def shortlist(view: PoolView, holders: dict[str, Holder], tiers: dict[str, dict[str, int]]) -> dict[str, Candidate]:
    return {c.worker_id: c for c in view.shortlist(N, (), holders, 0, 0, tiers)}


class TestView:
    def test_a_holder_by_tier_is_looked_at_whatever_its_load(self) -> None:
        rows = [row(with_tiers(f"p{i:03}"), i, load(HOST), pending_tokens=i) for i in range(1, 201)]
        found = shortlist(view_of(*rows), {}, {"150": {"host": 60, "disk": 64}})
        assert found["p150"].held == (HeldPrefix(60 * BLOCK_TOKENS, 50_000.0, 0.002),)  # it has no disk
        assert not any(c.held for name, c in found.items() if name != "p150")

    def test_many_holders_make_no_long_list(self) -> None:
        rows = [row(with_tiers(f"p{i:03}"), i, load(HOST), pending_tokens=i) for i in range(1, 201)]
        tiers = {str(i): {"host": 60} for i in range(1, 201)}
        assert len(shortlist(view_of(*rows), {}, tiers)) <= 40

    def test_the_shared_store_counts_for_all_that_use_it(self) -> None:
        rows = [row(with_tiers("p1"), 1, load(STORE)), row(with_tiers("p2"), 2, load(HOST))]
        rows += [row(with_tiers("p3"), 3, load(HOST, STORE))]
        found = shortlist(view_of(*rows), {}, {FORM.name: {"store": 32}})
        assert [len(found[name].held) for name in ("p1", "p2", "p3")] == [1, 0, 1]

    def test_who_drains_or_only_decodes_is_not_looked_at_for_its_tiers(self) -> None:
        rows = [row(with_tiers("p1"), 1, load(HOST), is_draining=True)]
        rows += [row(with_tiers(f"d{i}", WorkerRole.DECODE), 10 + i, load(HOST), num_decodes=i) for i in range(60)]
        assert {"p1", "d59"} & {*shortlist(view_of(*rows), {}, {"1": {"host": 9}, "69": {"host": 9}})} == set()

    def test_another_workers_cache_counts_over_a_link_that_was_measured(self) -> None:
        holder = row(with_tiers("d1", WorkerRole.DECODE), 1, load())
        for rate, expected in ((0.0, ()), (20_000.0, (HeldPrefix(640, 20_000.0, 0.005, is_peer=True),))):
            other = row(with_tiers("p2"), 2, replace(load(), transfer_rate=rate))
            assert shortlist(view_of(holder, other), {"1": Holder(10, 0, True)}, {})["p2"].held == expected

    def test_another_workers_tier_counts_over_the_same_link_if_its_cache_has_less(self) -> None:
        holder = row(with_tiers("p1"), 1, load(HOST))
        other = row(with_tiers("p2"), 2, replace(load(), transfer_rate=50_000.0))
        view, tiers, both = view_of(holder, other), {"1": {"host": 12}}, 1 / (1 / 50_000.0 + 1 / 50_000.0)
        for holders, expected in (
            ({}, HeldPrefix(768, both, 0.005, is_peer=True)),
            ({"1": Holder(10, 0, False)}, HeldPrefix(768, both, 0.005, is_peer=True)),
            ({"1": Holder(12, 0, False)}, HeldPrefix(768, 50_000.0, 0.005, is_peer=True)),
        ):
            candidate = shortlist(view, holders, tiers)["p2"]
            assert candidate.held == (expected,)
            found = view.source(candidate, holders, tiers)
            assert found and found.worker_id == "p1"

    def test_gpus_pull(self) -> None:
        gpu: dict[str, Any] = {"ways": ways("l", memory="cuda")}
        holder = row(with_tiers("d1", WorkerRole.DECODE, **gpu), 1, load())
        other = row(with_tiers("p2", **gpu), 2, replace(load(), transfer_rate=20_000.0))
        pulled = HeldPrefix(640, 20_000.0, 0.005, is_peer=True)
        assert shortlist(view_of(holder, other), {"1": Holder(10, 0, True)}, {})["p2"].held == (pulled,)

    def test_no_source_is_named_for_what_the_own_tiers_give(self) -> None:
        rows = [row(with_tiers("p1"), 1, load(HOST)), row(with_tiers("d2", WorkerRole.DECODE), 2, load())]
        view, holders = view_of(*rows), {"2": Holder(10, 0, False)}
        for depth, source in ((10, None), (12, None), (8, "d2")):
            candidate = with_load(shortlist(view, holders, {"1": {"host": depth}})["p1"], N)
            found = view.source(candidate, holders)
            assert (found and found.worker_id) == source

    def test_forms_are_those_of_workers_with_tiers(self) -> None:
        layouts = [replace(LAYOUT, model=name) for name in "abc"]
        rows = [row(node(f"p{i}", WorkerRole.PREFILL, layout=layouts[i // 2]), i + 1, load(HOST)) for i in range(5)]
        view = view_of(row(with_tiers("plain"), 9, load()), *rows)
        assert len(view.kv_forms) == MAX_FORMS and {form.shared_id for form in view.kv_forms} == {
            layout.shared_id for layout in layouts[:2]
        }
        for i in range(5):  # they turn their tiers off
            view.apply(view_update(row(node(f"p{i}", WorkerRole.PREFILL, layout=layouts[i // 2]), i + 1, load())))
        assert view.kv_forms == []
        view.apply(view_update(row(with_tiers("plain"), 9, load(HOST))))
        assert view.kv_forms == [FORM]
        view.update_counts(WorkerId("plain"), None, 0)
        assert view.kv_forms == []


def view_update(*rows: PoolRow) -> PoolUpdate:
    return PoolUpdate(now_us=1, rows=[*rows], is_full=False)


class TestKeys:
    """A gateway and a worker mean the same block by the same key."""

    @pytest.mark.parametrize("salt", ["", "tenant"])
    @pytest.mark.parametrize("num_tokens", [63, 64, 700, 4096, 9000])
    def test_they_are_those_of_the_engines_blocks(self, salt: str, num_tokens: int) -> None:
        tokens = [(index * 7919) % 50_000 for index in range(num_tokens)]
        digests = chain_hashes(tokens, 16, None, salted(salt))
        found = PromptPrefixes(tokens, salted(salt)).held_keys([FORM])
        assert [key.depth for key in found] == sorted((key.depth for key in found), reverse=True)
        assert bool(found) == (num_tokens >= BLOCK_TOKENS)
        for form, depth, key in found:
            assert key == block_key(form.shared_id, digests[depth * BLOCK_TOKENS // 16 - 1])

    def test_the_deepest_of_each_tier_counts(self) -> None:
        keys = PromptPrefixes([1] * 4 * BLOCK_TOKENS).held_keys([FORM])
        lines = [b"", b"7:host *:store", b"7:host 7:disk 8:host", b"9:host"]
        expected = {"7": {"host": 3, "disk": 2}, FORM.name: {"store": 3}, "8": {"host": 2}}
        assert tier_depths(keys, lines, 99) == expected | {"9": {"host": 1}}
        assert tier_depths(keys, lines, 3) == expected


KEYS = [bytes([index]) * 16 for index in range(40)]


class TestStore:
    """What the registry remembers of tiers, in Redis and in its twin."""

    async def publish(self, store: Store, name: str, *changes: tuple[str, int, bool], incarnation: str = "a") -> bool:
        news = [HeldChange(tier, KEYS[key], is_held) for tier, key, is_held in changes]
        return await store.publish_held(WorkerId(name), Incarnation(incarnation), news)

    async def terms(self, store: Store) -> dict[str, str]:
        rows = [row async for part in store.pool(0, True) for row in part.rows]
        return {row.worker_id: row.counts.term for row in rows if row.counts is not None}

    async def test_the_newest_comes_first_and_what_is_gone_is_gone(self, store: Store) -> None:
        await store.join(with_tiers("p0"))
        await store.join(with_tiers("p1"))
        names = await self.terms(store)
        assert await self.publish(store, "p0", ("host", 1, True), ("disk", 1, True), ("host", 2, True))
        assert await self.publish(store, "p1", ("host", 1, True), ("store", 3, True), ("host", 9, False))
        p0, p1 = names["p0"], names["p1"]
        line = f"{p1}:host {p0}:disk {p0}:host"
        assert await store.prefix_holders([], [*KEYS[1:4]]) == [line.encode(), f"{p0}:host".encode(), b"*:store"]
        assert await self.publish(store, "p0", ("host", 1, False), ("host", 2, False), ("store", 3, False))
        assert await store.prefix_holders([KEYS[0]], KEYS[1:4]) == [b"", f"{p1}:host {p0}:disk".encode(), b"", b""]

    async def test_a_mark_that_is_told_again_is_there_once(self, store: Store) -> None:
        await store.join(with_tiers("p0"))
        for _ in range(3):
            await self.publish(store, "p0", ("host", 1, True))
        assert len((await store.prefix_holders([], KEYS[1:2]))[0].split()) == 1

    async def test_a_block_remembers_the_last_that_hold_it(self, store: Store) -> None:
        for index in range(MAX_HELD_BY + 5):
            await store.join(with_tiers(f"p{index}"))
            await self.publish(store, f"p{index}", ("host", 1, True))
        names = await self.terms(store)
        (line,) = await store.prefix_holders([], KEYS[1:2])
        newest = [names[f"p{index}"] for index in reversed(range(5, MAX_HELD_BY + 5))]
        assert line.decode().split() == [f"{term}:host" for term in newest]

    async def test_only_the_current_join_of_a_worker_is_heard(self, store: Store) -> None:
        assert not await self.publish(store, "p0", ("host", 1, True))
        await store.join(with_tiers("p0"))
        assert not await self.publish(store, "p0", ("host", 1, True), incarnation="b")
        assert await self.publish(store, "p0", ("host", 1, True))
        assert await store.prefix_holders([], KEYS[1:2]) != [b""]

    async def test_marks_are_forgotten_unless_told_again(
        self, redis_store: RedisStore, any_server: RedisServer
    ) -> None:
        await redis_store.join(with_tiers("p0"))
        await self.publish(redis_store, "p0", ("host", 1, True), ("disk", 1, True))
        await self.publish(redis_store, "p0", ("host", 1, False))
        async with Redis.from_url(any_server.url) as client:
            left_ms = await client.pttl(redis_store.prefix.encode() + b"held:" + KEYS[1])
        assert 0 < left_ms <= 600_000


@dataclass
class Pool:
    """Prefill workers with host memory, one decode worker, and a gateway."""

    store: Store
    infos: list[NodeInfo] = field(default_factory=lambda: [with_tiers("p0"), with_tiers("p1")])

    async def start(self) -> "Pool":
        for info in [*self.infos, with_tiers("d0", WorkerRole.DECODE)]:
            await self.store.join(info)
            tiers = (HOST,) if info.role is WorkerRole.PREFILL else ()
            await self.store.heartbeat(info.worker_id, A, load(*tiers))
        return self

    async def hold(self, name: str, prompt: PromptPrefixes, is_held: bool = True) -> None:
        changes = [HeldChange("host", key.key, is_held) for key in prompt.held_keys([FORM])]
        assert await self.store.publish_held(WorkerId(name), A, changes)

    async def place(self, name: str, prompt: PromptPrefixes) -> str:
        placer = Placer(self.store)
        route = await placer.place(ask(name, N, prefixes=prompt))
        await placer.close()
        return route.prefill.worker_id


class TestPlacing:
    """Whole placements, through the registry."""

    async def test_a_prompt_goes_where_host_memory_holds_it_and_counts_what_is_computed(self, store: Store) -> None:
        pool, prompt = await Pool(store).start(), PromptPrefixes([7] * N)
        await pool.hold("p1", prompt)
        assert await pool.place("r", prompt) == "p1"
        assert (await credits(store))["p1"][0] == 1  # all but the last token is held

    async def test_what_was_evicted_is_not_credited(self, store: Store) -> None:
        pool, prompt = await Pool(store).start(), PromptPrefixes([7] * N)
        await pool.hold("p1", prompt)
        await pool.hold("p1", prompt, is_held=False)
        assert await pool.place("r", prompt) == "p0"
        assert (await credits(store))["p0"][0] == N

    async def test_another_salt_finds_nothing(self, store: Store) -> None:
        pool = await Pool(store).start()
        await pool.hold("p1", PromptPrefixes([7] * N))
        assert await pool.place("r", PromptPrefixes([7] * N, salted("other"))) == "p0"

    async def test_a_holder_with_a_queue_of_fresh_counts_loses_at_the_store(self, store: Store) -> None:
        """Each prompt of another conversation that p1 computes makes its queue longer, until p0 is sooner."""
        pool, prompt = await Pool(store).start(), PromptPrefixes([7] * N)
        await pool.hold("p1", prompt)
        placer = Placer(store)
        for index in range(2):
            route = await placer.place(ask(f"other{index}", 5000, exclude=(WorkerId("p0"),)))
            assert route.prefill.worker_id == "p1"
        assert (await placer.place(ask("r", N, prefixes=prompt))).prefill.worker_id == "p0"
        await placer.close()


async def test_pools_without_tiers_look_nothing_up() -> None:
    """It costs them nothing: neither keys nor a longer call."""
    asked: list[int] = []

    class Asked(MemoryStore):
        async def prefix_holders(self, hashes: Sequence[bytes], blocks: Sequence[bytes] = ()) -> list[bytes]:
            asked.append(len(blocks))
            return await super().prefix_holders(hashes, blocks)

    pool = await Pool(Asked(), []).start()
    await pool.store.join(node("m", WorkerRole.MIXED))
    await pool.place("r", PromptPrefixes([7] * N))
    assert asked == [0]
