"""The states of recurrent layers in KVGroups: snapshots at blocks' ends, one live page, and never another's content."""

from array import array
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.errors import ConfigError
from contracts.hashing import chain_hashes
from contracts.layout import KVLayout
from engine.cache.block_pool import BlockPool
from engine.cache.group_page_table import ABSENT, GroupPageTable
from engine.cache.kv_groups import KVGroups
from engine.cache.sizing import MIN_BLOCKS, MIN_STATES, CacheSize, cache_nbytes, cache_size
from engine.page_lease import PageLease
from engine.settings import EngineSettings
from tests.engine.cache.test_kv_groups import GROUPS, MAX_TOKENS, NUM_BLOCKS, SIZE, group

STATE = msgspec.structs.replace(group("state", layers=(1, 2)), planes=("state",))
LAYOUT = KVLayout(model="m", block_size=SIZE, groups=(GROUPS[0], STATE))
MIB = 1 << 20


def make(num_states: int) -> tuple[BlockPool, KVGroups, GroupPageTable]:
    table = GroupPageTable(NUM_BLOCKS, num_states)
    groups = KVGroups(LAYOUT, [table])
    return BlockPool(NUM_BLOCKS, SIZE, groups=groups), groups, table


def opened(groups: KVGroups, *branches: int) -> PageLease:
    lease = groups.open(MAX_TOKENS)
    assert lease is not None
    lease.branches = branches
    return lease


def test_a_page_is_one_row_and_the_one_that_moves_is_the_last():
    assert STATE.page_nbytes(1) == 4 * 4 and LAYOUT.block_nbytes == 2 * SIZE * 16 + 2 * 16
    places = {0: 0, 1: 0, SIZE: 0, SIZE + 1: 1, 2 * SIZE: 1, 2 * SIZE + 1: 2}
    assert {n: LAYOUT.first_needed(1, n) // SIZE for n in places} == places
    assert LAYOUT.skips(0, 11) == [0, 8] and LAYOUT.skips(8, 12) == [8, 8]


def test_a_prompt_keeps_its_last_full_block_where_it_ends_and_where_others_go_on():
    _, groups, table = make(8)
    lease = opened(groups, 3, 5)
    groups.cover(lease, range(6), 0, 0, 22)
    assert lease.held[0].keys() == {2, 4, 5}
    groups.settle(lease, 22)
    assert lease.held[0].keys() == {4, 5} and table.num_cached == 1
    for first in range(22, 30):  # the live page goes from block to block
        groups.settle(lease, first)
        groups.cover(lease, range(8), first, first, first + 1)
        assert len(lease.held[0]) <= 2 and {(first - 1) // SIZE, first // SIZE} <= lease.held[0].keys()
    groups.end(lease)
    groups.check([])
    assert [place for place in range(8) if not groups.lacks(place)] == [2, 4, 5, 6, 7]


def test_chunks_leave_a_state_at_their_ends():
    _, groups, _ = make(8)
    lease = opened(groups, 1)
    for first, end in ((0, 8), (8, 16), (16, 19)):
        groups.settle(lease, first)
        groups.cover(lease, range(5), first, first, end)
    groups.settle(lease, 19)
    assert lease.held[0].keys() == {3, 4} and [groups.usable(range(n)) for n in range(5)] == [0, 1, 2, 2, 4]
    assert groups.limit(lease, 0, 1000) == 1000  # a longer chunk takes no more pages


def test_what_can_be_done_without_is_left_out_where_there_is_no_room():
    _, groups, table = make(4)
    one, other = opened(groups, 1), opened(groups, 1)
    assert table.num_spare == 0 and groups.open(MAX_TOKENS) is None
    for lease, blocks in ((one, range(6)), (other, range(6, 12))):
        groups.cover(lease, blocks, 0, 0, 22)
        assert lease.held[0].keys() == {4, 5}
        groups.settle(lease, 22)
        groups.cover(lease, blocks, 22, 22, 23)
    groups.check([one, other])


def test_a_live_state_is_free_with_its_block_and_a_snapshot_is_found():
    pool, groups, table = make(4)
    lease, blocks, tokens = opened(groups), pool.allocate(3), list(range(10))
    groups.cover(lease, blocks, 0, 0, 10)
    for block, digest in zip(blocks, chain_hashes(tokens, SIZE), strict=False):
        pool.insert(block, digest, tokens[:SIZE])
    groups.end(lease)
    pool.release(blocks)
    assert (table.num_cached, table.num_held) == (1, 0)
    assert groups.usable(pool.find_by_digest(chain_hashes(tokens, SIZE))) == 2
    assert groups.usable_before(blocks[:2], 10) == 2  # of what comes from elsewhere only the last state is needed
    groups.check([])


def test_tiers_and_whole_blocks_are_refused():
    assert not make(NUM_BLOCKS)[1].are_whole
    with pytest.raises(ConfigError, match=r"keeps_whole_blocks.*recurrent layers.*without tiers"):
        cache_size(MIB, LAYOUT, EngineSettings(keeps_whole_blocks=True), 100)


WHOLE = KVLayout.uniform(model="m", num_layers=12, num_kv_heads=2, head_dim=256, block_size=16, dtype="bfloat16")
STATES = msgspec.structs.replace(
    STATE, layers=tuple(range(36)), num_kv_heads=16, head_dim=34304, block_size=16, dtype="float32"
)
LARGE = msgspec.structs.replace(WHOLE, groups=(*WHOLE.groups, STATES))
"""Qwen3-Next-80B-A3B's."""


def test_states_take_half_at_most_and_the_rest_is_for_contexts():
    state, full = LARGE.group_nbytes(1), LARGE.group_nbytes(0)
    assert (state, full) == (36 * 16 * 34304 * 4, 12 * 2 * 2 * 256 * 2 * 16)
    size = cache_size(2048 * MIB, LARGE, EngineSettings(), 262144)
    assert size == CacheSize(
        (2048 * MIB - 13 * state) // full, (13,), 13 * state + (2048 * MIB - 13 * state) // full * full
    )
    few = EngineSettings(max_num_seqs=2)
    assert cache_size(2048 * MIB, LARGE, few, 262144).num_pages == (8,)
    assert cache_nbytes(few, LARGE, 64 << 30) == 8 * state + 1024 * full
    least = 2 * MIN_STATES * state
    assert cache_size(least, LARGE, EngineSettings(), 100).num_pages == (MIN_STATES,)
    with pytest.raises(ConfigError, match=rf"{MIN_STATES} states of {state} bytes and {MIN_BLOCKS} blocks .* {least}"):
        cache_size(least - 1, LARGE, EngineSettings(), 100)


@dataclass(eq=False)
class Computed:
    tokens: list[int]
    lease: PageLease
    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    num_computed: int = 0


class Work(RuleBasedStateMachine):
    """Sequences that share prefixes, are computed in chunks of whole blocks, decoded, handed in, and end.

    `memory[page]` is the tokens that the state in it has taken in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.groups, self.table = make(5)
        self.memory: dict[int, tuple[int, ...]] = {}
        self.sequences: list[Computed] = []

    tokens = st.lists(st.integers(0, 1), min_size=2, max_size=4).map(lambda runs: [t for r in runs for t in [r] * 9])

    def begin(self, tokens: list[int], num_here: int | None) -> None:
        """`num_here`: so many tokens come from elsewhere; None: they are computed."""
        digests = chain_hashes(tokens, SIZE)[: ((len(tokens) if num_here is None else num_here) - 1) // SIZE]
        found = self.pool.find(digests, tokens)
        usable = self.groups.usable(found) if num_here is None else self.groups.usable_before(found, num_here)
        cached, lease = found[:usable], None
        num_missing = -(-(len(tokens) + 1) // SIZE) - len(cached)
        if self.pool.fits(num_missing, cached):
            lease = self.groups.open(len(tokens))
        if lease is None:
            return
        sequence, hit = Computed(tokens, lease), len(cached) * SIZE
        lease.branches = (len(found), len(digests))
        self.pool.retain(cached)
        sequence.blocks.extend(cached)
        self.groups.cover(lease, cached, hit if num_here is None else num_here, hit, hit)
        sequence.blocks.extend(self.pool.allocate(num_missing))
        sequence.num_computed = hit
        self.sequences.append(sequence)
        if num_here is not None:
            self.groups.cover(lease, sequence.blocks, num_here, hit, num_here + 1)
            self.write(sequence, LAYOUT.first_needed(1, num_here), num_here)
            self.computed(sequence, num_here)

    @rule(tokens=tokens)
    def submit(self, tokens):
        self.begin(tokens, None)

    @rule(tokens=tokens, short=st.integers(1, 8))
    def arrive(self, tokens, short):
        self.begin(tokens, len(tokens) - short)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_blocks=st.integers(1, 5))
    def compute(self, data, num_blocks):
        sequence = data.draw(st.sampled_from(self.sequences))
        first, last = sequence.num_computed, len(sequence.tokens)
        if first == last:
            return
        end = first + 1 if first % SIZE else min(first + num_blocks * SIZE, last)
        self.groups.settle(sequence.lease, first)
        self.groups.cover(sequence.lease, sequence.blocks, first, first, end)
        if first:
            page = int(self.table.page_of[sequence.blocks[(first - 1) // SIZE]])
            assert self.memory[page] == tuple(sequence.tokens[:first])
        self.write(sequence, first, end)
        self.computed(sequence, end)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data):
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.groups.end(sequence.lease)
        self.pool.release(sequence.blocks)

    def write(self, sequence: Computed, first: int, end: int) -> None:
        places = range(first // SIZE, -(-end // SIZE))
        pages = [int(self.table.page_of[sequence.blocks[place]]) for place in places]
        assert pages[-1] != ABSENT
        for place, page in zip(places, pages, strict=True):
            if page != ABSENT:
                self.memory[page] = tuple(sequence.tokens[: min((place + 1) * SIZE, end)])

    def computed(self, sequence: Computed, end: int) -> None:
        sequence.num_computed = end
        for place, digest in enumerate(chain_hashes(sequence.tokens[:end], SIZE)):
            self.pool.insert(sequence.blocks[place], digest, sequence.tokens[place * SIZE : (place + 1) * SIZE])
        self.groups.settle(sequence.lease, end)

    @invariant()
    def every_snapshot_that_is_found_is_of_its_blocks_tokens(self):
        for sequence in self.sequences:
            for place in range(sequence.num_computed // SIZE):
                page = int(self.table.page_of[sequence.blocks[place]])
                assert page == ABSENT or self.memory[page] == tuple(sequence.tokens[: (place + 1) * SIZE])

    @invariant()
    def the_accounts_are_right(self):
        self.pool.check()
        self.groups.check([sequence.lease for sequence in self.sequences])


TestWork = Work.TestCase
