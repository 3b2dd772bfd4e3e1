"""KVGroups: a continuation finds every page that it reads, with the content of its own tokens, in any order of work."""

from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.hashing import chain_hashes
from contracts.layout import KVGroup, KVLayout
from engine.cache.block_pool import BlockPool
from engine.cache.group_page_table import ABSENT, GroupPageTable
from engine.cache.kv_groups import KVGroups, pages_of_sequence
from engine.page_lease import PageLease

SIZE, WINDOW, SEGMENT = 4, 10, 8
NUM_BLOCKS = 24
MAX_TOKENS = 40


def group(kind: str, span: int = 0, layers: tuple[int, ...] = (0,)) -> KVGroup:
    facts = {"num_kv_heads": 1, "head_dim": 4, "block_size": SIZE, "dtype": "float32"}
    return KVGroup(kind=kind, span=span, layers=layers, **facts)  # type: ignore[arg-type]


GROUPS = group("full"), group("window", WINDOW), group("segment", SEGMENT)
LAYOUT = KVLayout(model="m", block_size=SIZE, groups=GROUPS)


def make(num_window: int, num_segment: int, draft: int = 0) -> tuple[BlockPool, KVGroups, list[GroupPageTable]]:
    tables = [GroupPageTable(NUM_BLOCKS, num_window), GroupPageTable(NUM_BLOCKS, num_segment)]
    groups = KVGroups(LAYOUT, tables, draft)
    return BlockPool(NUM_BLOCKS, SIZE, groups=groups), groups, tables


@pytest.mark.parametrize("num_tokens", range(4 * WINDOW))
def test_what_is_kept_is_what_the_next_tokens_and_the_last_boundary_see(num_tokens):
    boundary = num_tokens // SIZE * SIZE
    for position in (boundary, num_tokens):
        assert LAYOUT.first_needed(1, num_tokens) <= max(position - WINDOW + 1, 0)
        assert LAYOUT.first_needed(2, num_tokens) <= position // SEGMENT * SEGMENT
    assert LAYOUT.first_needed(0, num_tokens) == 0
    for index in (1, 2):
        first = LAYOUT.first_needed(index, num_tokens)
        assert first % SIZE == 0 and num_tokens // SIZE - first // SIZE + 1 <= pages_of_sequence(LAYOUT, index)
    assert LAYOUT.first_needed(1, num_tokens) > boundary - WINDOW + 1 - SIZE or boundary < WINDOW  # and not more


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (group("window"), "span is 0; its kind is window"),
        (group("full", 8), "span is 8; its kind is full"),
        (group("segment", 10), "span is 10, not a multiple"),
    ],
)
def test_a_span_that_does_not_fit_its_kind_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        KVLayout(model="m", block_size=SIZE, groups=(wrong,))


def test_a_layout_of_another_window_is_told_apart():
    other = KVLayout(model="m", block_size=SIZE, groups=(GROUPS[0], group("window", 6), GROUPS[2]))
    assert LAYOUT.difference(other) == ("groups[1].span", WINDOW, 6)
    assert LAYOUT.layout_id != other.layout_id and LAYOUT.shared_id != other.shared_id


def test_a_hit_is_shortened_to_the_longest_boundary_that_all_groups_serve():
    _, groups, (window, segment) = make(NUM_BLOCKS, NUM_BLOCKS)
    blocks = list(range(8))
    groups.fill(blocks)
    assert groups.usable(blocks) == 8
    segment.forget([6])  # at 7 blocks that of the segment is missing; at 8 there is nothing of a new one
    assert [groups.usable(blocks[:count]) for count in (8, 7, 6)] == [8, 6, 6]
    window.forget([5])  # behind 6, 7 and 8 blocks a window reads it, and behind 5 it does not
    assert groups.usable(blocks) == 5
    assert groups.usable(blocks[6:], first_block=6) == 2  # whoever asks has those before
    assert groups.usable_before(blocks, 32) == 5 and groups.usable_before(blocks[:6], 40) == 6
    assert groups.usable_before(blocks, 40) == 8  # at 40 tokens nothing of block 5 is read


def test_passed_pages_go_before_those_where_a_sequence_ended():
    _, groups, (window, _) = make(10, NUM_BLOCKS)
    first, second = groups.open(MAX_TOKENS), groups.open(MAX_TOKENS)
    assert first is not None and second is not None
    groups.cover(first, range(4), 0, 0, 16)
    groups.settle(first, 16)
    assert first.held[0].keys() == {1, 2, 3} and window.num_cached == 1
    groups.end(first)
    groups.cover(second, range(10, 18), 0, 0, 28)  # takes the three that are free, and then that of block 0
    assert [groups.lacks(block) for block in (0, 1, 2, 3)] == [True, False, False, False]


def test_a_branch_is_kept_as_an_end_is():
    _, groups, (window, _) = make(10, NUM_BLOCKS)
    lease, other = groups.open(MAX_TOKENS), groups.open(16)
    assert lease is not None and other is not None
    lease.branches = (5,)  # which needs blocks 2 to 4
    groups.cover(lease, range(6), 0, 0, 24)
    groups.settle(lease, 24)
    groups.end(lease)
    groups.cover(other, range(10, 19), 0, 0, 36)
    assert window.page_of[:6].tolist() == [ABSENT, ABSENT, ABSENT, ABSENT, ABSENT, 5]
    assert window.num_cached == 1


def test_a_branch_outlives_what_others_have_passed():
    _, groups, _ = make(13, NUM_BLOCKS)
    lease, other = groups.open(MAX_TOKENS), groups.open(MAX_TOKENS)
    assert lease is not None and other is not None
    lease.branches = (5,)
    groups.cover(lease, range(7), 0, 0, 28)
    groups.settle(lease, 28)  # passes blocks 0 to 3
    groups.cover(other, range(10, 18), 0, 0, 32)  # takes the six that are free, and those of blocks 0 and 1
    assert [groups.lacks(block) for block in range(4)] == [True, True, False, False]
    groups.settle(other, 32)
    groups.cover(other, range(10, 20), 32, 32, 40)
    assert not groups.lacks(2) and not groups.lacks(3) and groups.lacks(10)


def test_no_lease_is_opened_that_could_lack_a_page():
    _, groups, (window, _) = make(8, NUM_BLOCKS)
    leases = [groups.open(MAX_TOKENS) for _ in range(3)]
    assert [lease is not None for lease in leases] == [True, True, False]
    assert window.num_spare == 0 and groups.limit(leases[0], 17, 100) == 20  # type: ignore[arg-type]
    before = groups.num_gains
    groups.end(leases[0])
    assert groups.num_gains > before and groups.open(MAX_TOKENS, num_more=1) is None
    assert groups.open(MAX_TOKENS) is not None and groups.open(SIZE) is None


@pytest.mark.parametrize(
    ("known", "most", "computed"), [(13, 20, 13), (13, 20, 18), (21, 24, 25), (5, 5, 5), (30, 60, 33)]
)
def test_a_sequence_that_goes_on_beyond_what_is_pinned_keeps_within_its_quota(known, most, computed):
    _, groups, tables = make(20, 20, draft=SIZE)
    longest, blocks = 88, range(NUM_BLOCKS)
    lease = groups.open(longest)
    assert lease is not None
    for end in range(1, computed + 1):
        groups.cover(lease, blocks, end - 1, end - 1, end)
        groups.settle(lease, known if end > known else end)
    before = list(lease.quotas)
    assert groups.pin(lease, blocks[: computed // SIZE], known, most, longest)
    kept = [range(LAYOUT.first_needed(index, known) // SIZE, -(-most // SIZE)) for index in (1, 2)]
    for end in range(computed, longest - SIZE):
        groups.cover(lease, blocks, end, end, end + 1 + SIZE)
        groups.settle(lease, end + 1)
        groups.drop_behind(lease, -(-(end + 2) // SIZE))
        for number, held in enumerate(lease.held):
            assert len(held) <= lease.quotas[number]
            assert all(place in held for place in kept[number] if place * SIZE < end)
    groups.unpin(lease, longest - SIZE, longest)
    assert lease.quotas == before and all(len(held) <= quota for held, quota in zip(lease.held, before, strict=True))
    for number, index in enumerate((1, 2)):
        assert min(lease.held[number], default=99) >= LAYOUT.first_needed(index, longest - SIZE) // SIZE
    groups.check([lease])
    groups.end(lease)
    assert tables[0].num_held == tables[1].num_held == tables[0].promised == tables[1].promised == 0


def test_a_page_that_was_lost_is_noticed():
    _, groups, (window, _) = make(NUM_BLOCKS, NUM_BLOCKS)
    lease = groups.open(MAX_TOKENS)
    assert lease is not None
    with pytest.raises(AssertionError, match="block 2 has lost its page"):
        window.fill(1)
        window.fill(3)
        groups.cover(lease, range(8), 17, 17, 18)


def test_a_block_that_lacks_a_page_gives_its_digest_to_one_that_does_not():
    pool, groups, (window, _) = make(NUM_BLOCKS, NUM_BLOCKS)
    (digest,) = chain_hashes([1] * SIZE, SIZE)
    old, new = pool.allocate(2)
    groups.fill([old])
    pool.insert(old, digest, [1] * SIZE)
    assert not pool.insert(new, digest, [1] * SIZE)  # the first is as good
    window.forget([old])
    assert not pool.insert(new, digest, [1] * SIZE)  # and neither is better
    groups.fill([new])
    assert pool.insert(new, digest, [1] * SIZE)
    assert pool.find_by_digest([digest]) == [new]
    pool.release([old, new])
    pool.check()
    assert pool.num_cached == 1 and pool.generations[old] == 1


@dataclass(eq=False)
class Computed:
    tokens: list[int]
    lease: PageLease
    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    num_computed: int = 0


class Work(RuleBasedStateMachine):
    """Sequences that share prefixes, are computed in chunks, drafted, handed in, and end, over few pages.

    `memory[group][page]` is what was last written there: the tokens up to the block's end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.groups, self.tables = make(13, 9, draft=SIZE)
        self.memory: list[dict[int, tuple[int, ...]]] = [{}, {}]
        self.sequences: list[Computed] = []

    tokens = st.lists(st.integers(0, 1), min_size=2, max_size=4).map(lambda runs: [t for r in runs for t in [r] * 9])

    def begin(self, tokens: list[int], num_here: int | None) -> None:
        """`num_here`: so many tokens come from elsewhere; None: they are computed."""
        digests = chain_hashes(tokens, SIZE)[: (len(tokens) - 1) // SIZE]
        cached = self.pool.find(digests, tokens)
        matched = len(cached)
        usable = self.groups.usable(cached) if num_here is None else self.groups.usable_before(cached, num_here)
        cached = cached[:usable]
        lease = None
        num_missing = -(-(len(tokens) + SIZE + 1) // SIZE) - len(cached)
        if self.pool.fits(num_missing, cached):
            lease = self.groups.open(len(tokens) + SIZE)
        if lease is None:
            return
        sequence, hit = Computed(tokens, lease), len(cached) * SIZE
        lease.branches = (matched,)
        self.pool.retain(cached)
        sequence.blocks.extend(cached)
        self.groups.cover(lease, cached, hit if num_here is None else num_here, hit, hit)
        sequence.blocks.extend(self.pool.allocate(num_missing))
        sequence.num_computed = hit
        self.sequences.append(sequence)
        if num_here is not None:
            self.groups.cover(lease, sequence.blocks, num_here, hit, num_here + 1)
            self.write(sequence, max(hit, min(LAYOUT.first_needed(i, num_here) for i in (1, 2))), num_here)
            sequence.num_computed = num_here
            self.insert(sequence)

    @rule(tokens=tokens)
    def submit(self, tokens):
        self.begin(tokens, None)

    @rule(tokens=tokens, short=st.integers(1, 8))
    def arrive(self, tokens, short):
        self.begin(tokens, len(tokens) - short)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 20), draft=st.integers(0, SIZE))
    def compute(self, data, count, draft):
        sequence = data.draw(st.sampled_from(self.sequences))
        first = sequence.num_computed
        end = self.groups.limit(sequence.lease, first, min(first + count, len(sequence.tokens)))
        if end <= first:
            assert first == len(sequence.tokens)
            return
        drafted = draft if end == first + 1 and end == len(sequence.tokens) else 0
        self.groups.cover(sequence.lease, sequence.blocks, first, first, end + drafted)
        self.read(sequence, first, end)
        self.write(sequence, first, end)
        sequence.num_computed = end
        self.insert(sequence)
        self.groups.settle(sequence.lease, end)
        self.groups.drop_behind(sequence.lease, -(-(end + 1) // SIZE))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data):
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(sequence.blocks)
        self.groups.end(sequence.lease)

    def read(self, sequence: Computed, first: int, end: int) -> None:
        """All that the tokens see has the content of the sequence's own tokens."""
        for position in range(first, end):
            for number, start in enumerate((max(position - WINDOW + 1, 0), position // SEGMENT * SEGMENT)):
                for place in range(start // SIZE, -(-position // SIZE)):
                    held = int(self.tables[number].page_of[sequence.blocks[place]])
                    known = min((place + 1) * SIZE, first)
                    if place * SIZE < known:
                        found = self.memory[number][held]
                        assert found[:known] == tuple(sequence.tokens[:known]), (number, place)

    def write(self, sequence: Computed, first: int, end: int) -> None:
        for number, table in enumerate(self.tables):
            for place in range(first // SIZE, -(-end // SIZE)):
                page = int(table.page_of[sequence.blocks[place]])
                if page != ABSENT:
                    self.memory[number][page] = tuple(sequence.tokens[: min((place + 1) * SIZE, end)])

    def insert(self, sequence: Computed) -> None:
        digests = chain_hashes(sequence.tokens[: sequence.num_computed], SIZE)
        for place, digest in enumerate(digests):
            self.pool.insert(sequence.blocks[place], digest, sequence.tokens[place * SIZE : (place + 1) * SIZE])

    @invariant()
    def accounts_are_right(self):
        self.pool.check()
        self.groups.check(sequence.lease for sequence in self.sequences)


TestWork = Work.TestCase
