"""The pages of groups of layers that live shorter than a sequence.

These are windows, segments and recurrent states. The blocks of BlockPool are what sequences, the prefix cache and
transfers speak of. A group of full attention has a page for each of them, of the same number. A group of short life has
fewer pages, and a table of the blocks that have one: a page is attached when its block is computed or arrives, held
while a sequence needs it, and evicted for another block's sake once nobody does. A cached prefix serves only up to a
boundary behind which every group has what a continuation needs (KVLayout.first_needed).

A state is overwritten as its sequence goes on. The page of a block that is being filled is the live one; that of a full
block is a snapshot at its end. Snapshots are made where a step ends and where others may go on, and of other blocks
there is none: each takes as much room as the KV of hundreds of tokens.

Plain accounting, as BlockPool: it never sees the bytes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from contracts.ids import BlockId
from contracts.layout import KVLayout
from engine.cache.group_page_table import ABSENT, GroupPageTable
from engine.page_lease import PageLease


class KVGroups:
    """The groups of short life of one engine, `tables` in the layout's order; there may be none.

    An open lease has its quota at any time, so a sequence that runs never lacks a page. What is beyond all quotas is
    for the tokens of prompts that a step computes, and for what may be found again.

    `num_draft_tokens`: the most that a step may compute behind the newest token. `num_gains`: see BlockPool.
    """

    def __init__(self, layout: KVLayout, tables: Sequence[GroupPageTable], num_draft_tokens: int = 0) -> None:
        indices = [index for index, group in enumerate(layout.groups) if group.is_short]
        self._layout, self._num_draft_tokens, self.num_gains = layout, num_draft_tokens, 0
        self._groups = list(zip(indices, tables, strict=True))
        for index, table in self._groups:
            most = pages_of_sequence(layout, index, num_draft_tokens)
            assert table.is_whole or most <= table.num_pages, f"{table.num_pages} pages, a sequence needs {most}"

    @property
    def are_whole(self) -> bool:
        """Return whether every block has a page in every group as long as it lives."""
        return not self.has_states and all(table.is_whole for _, table in self._groups)

    @property
    def has_states(self) -> bool:
        """Return whether there are recurrent layers: chunks of prompts end at blocks' edges, as snapshots do."""
        return any(self._layout.groups[index].is_state for index, _ in self._groups)

    def usage(self) -> dict[str, int]:
        """Return how many pages there are, are held, and may be found again; nothing without groups."""
        if not self._groups:
            return {}
        tables = [table for _, table in self._groups]
        return {
            "window_pages": sum(table.num_pages for table in tables),
            "window_pages_held": sum(table.num_held for table in tables),
            "window_pages_cached": sum(table.num_cached for table in tables),
        }

    def pages(self, index: int, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Return the pages of blocks in one group of the layout; all of them have one."""
        for number, table in self._groups:
            if number == index:
                pages = table.page_of[list(blocks)].tolist()
                assert ABSENT not in pages, f"blocks {blocks} have pages {pages} in group {index}"
                return pages
        return list(blocks)

    def lacks(self, block: int) -> bool:
        """Return whether a block has no page in one of the groups."""
        return any(table.page_of[block] == ABSENT for _, table in self._groups)

    def usable(self, blocks: Sequence[int], first_block: int = 0) -> int:
        """Return behind how many of these blocks a continuation has all that it needs.

        They are cached, and those of a prompt from its block `first_block` on; those before are the caller's.
        """
        count, gaps = len(blocks), [(index, _gaps(table, blocks)) for index, table in self._groups]
        while count:
            starts = [max(self._start(index, first_block + count) - first_block, 0) for index, _ in gaps]
            if all(gap[count - 1] < start for start, (_, gap) in zip(starts, gaps, strict=True)):
                break
            count -= 1
        return count

    def usable_before(self, blocks: Sequence[int], num_tokens: int) -> int:
        """Return how many of these first blocks of a prompt serve one whose other KV comes from elsewhere.

        It goes on behind `num_tokens`: of a group of short life only what is needed there has to be here.
        """
        count = len(blocks)
        for index, table in self._groups:
            start = self._layout.first_needed(index, num_tokens) // self._layout.block_size
            absent = np.flatnonzero(table.page_of[list(blocks[start:])] == ABSENT)
            count = min(count, start + int(absent[0])) if len(absent) else count
        return count

    def open(self, num_tokens: int, num_more: int = 0) -> PageLease | None:
        """Return a lease for a sequence of at most `num_tokens`, or None if there is no room for its quota.

        `num_more`: so many tokens that it holds beside those that a continuation needs.
        """
        quotas = self._quotas(num_tokens, self._layout.num_blocks(num_more))
        lease = PageLease(quotas, [{} for _ in quotas])
        if any(quota > table.num_spare for quota, (_, table) in zip(quotas, self._groups, strict=True)):
            return None
        for quota, (_, table) in zip(quotas, self._groups, strict=True):
            self._promise(table, quota)
        return lease

    def nothing(self) -> PageLease:
        """Return a lease of no page."""
        return PageLease([0] * len(self._groups), [{} for _ in self._groups])

    def narrow(self, lease: PageLease, num_tokens: int) -> None:
        """Have no more promised to a lease than a sequence of at most `num_tokens` needs."""
        for number, quota in enumerate(self._quotas(num_tokens)):
            table, before = self._groups[number][1], lease.weight(number)
            lease.quotas[number] = min(lease.quotas[number], quota)
            self._promise(table, lease.weight(number) - before)

    def limit(self, lease: PageLease, first_token: int, end: int) -> int:
        """Return up to which token, `end` at most, a chunk finds pages; that is a block at least.

        A state's take no more for a longer one.
        """
        size = self._layout.block_size
        for number, (index, table) in enumerate(self._groups):
            if not table.is_whole and not self._layout.groups[index].is_state:
                room = lease.weight(number) + table.num_spare
                end = min(end, (self._start(index, first_token // size) + room) * size)
        return end

    def cover(
        self, lease: PageLease, blocks: Sequence[int], needed_at: int, num_known: int, end: int, first_block: int = 0
    ) -> None:
        """Hold the pages that a continuation behind `needed_at` tokens needs, and those up to token `end`.

        `blocks`: the sequence's, from its `first_block` on. Those of the first `num_known` tokens have their content,
        the others get it.
        """
        size, num_blocks = self._layout.block_size, self._layout.num_blocks(end)
        for number, (index, table) in enumerate(self._groups):
            held, is_state = lease.held[number], self._layout.groups[index].is_state
            start = max(self._layout.first_needed(index, needed_at) // size, first_block)
            if start in held and num_blocks - 1 in held:  # without a gap, as most steps of an answer find it
                continue
            wanted = self._snapshots(lease, needed_at, end, start) if is_state else range(start, num_blocks)
            for place in [place for place in wanted if place not in held]:
                is_written = place == num_blocks - 1 or self._may_be_drafted(needed_at, end)
                is_needed = not is_state or is_written or (place == start and needed_at > 0)
                if not is_needed and not self._has_room(lease, number):
                    continue
                block, before = blocks[place - first_block], lease.weight(number)
                has_page = table.page_of[block] != ABSENT
                assert has_page or place * size >= num_known, f"block {block} has lost its page"
                table.hold(block)
                held[place] = block
                self._promise(table, lease.weight(number) - before)

    def settle(self, lease: PageLease, num_tokens: int) -> None:
        """Let go what a continuation behind `num_tokens` does not need, unless it is pinned."""
        for number, (index, _) in enumerate(self._groups):
            start, held = self._start(index, num_tokens // self._layout.block_size), lease.held[number]
            has_gaps = self._layout.groups[index].is_state
            if any(place < start for place in held) if has_gaps else start - 1 in held:
                self._pass(lease, number, start)

    def drop_behind(self, lease: PageLease, num_blocks: int) -> None:
        """Let go the pages of all but the first blocks of a sequence."""
        for number, held in enumerate(lease.held):
            for place in [place for place in held if place >= num_blocks]:
                self._let_go(lease, number, place, is_passed=True)

    def pin(self, lease: PageLease, blocks: Sequence[int], num_tokens: int, most_tokens: int, longest: int) -> bool:
        """Keep what a continuation behind `num_tokens` needs for one more owner, as it grows to `most_tokens`.

        `blocks`: the sequence's, all of whose tokens are computed. It goes on beyond, up to `longest`, if its other
        owner takes its time. False, and nothing changes, if some of it is gone or there is no room for what comes.
        """
        pinned, growth = range(num_tokens, most_tokens), self._layout.num_blocks(longest - num_tokens)
        quotas: list[int] = []
        for number, (index, _) in enumerate(self._groups):
            num_more = min(growth, len(self._places(index, pinned)))
            quotas.append(max(lease.quotas[number], self._quotas(longest, num_more)[number]))
        before = [lease.weight(number) for number in range(len(self._groups))]
        has_room = all(
            quota - weight <= table.num_spare
            for quota, weight, (_, table) in zip(quotas, before, self._groups, strict=True)
        )
        if not has_room or self.usable_before(blocks, num_tokens) < len(blocks):
            return False
        lease.pinned, lease.quotas, end = pinned, quotas, len(blocks) * self._layout.block_size
        for number, (_, table) in enumerate(self._groups):
            self._promise(table, lease.weight(number) - before[number])
        self.cover(lease, blocks, num_tokens, end, end)
        lease.num_owners += 1
        return True

    def unpin(self, lease: PageLease, num_tokens: int, most_tokens: int) -> None:
        """Keep for the other owners what a sequence of `num_tokens`, and `most_tokens` at most, needs."""
        lease.pinned = None
        for number, (index, _) in enumerate(self._groups):  # there may be a gap between what was pinned and its window
            self._pass(lease, number, self._start(index, num_tokens // self._layout.block_size))
        self.narrow(lease, most_tokens)
        self.end(lease)

    def split(self, lease: PageLease, num_blocks: int) -> PageLease:
        """Return a lease for one of the owners, which takes over the pages of all but the first blocks."""
        other = self.nothing()
        lease.num_owners -= 1
        for number, (_, table) in enumerate(self._groups):
            before = lease.weight(number)
            for place in [place for place in lease.held[number] if place >= num_blocks]:
                other.held[number][place] = lease.held[number].pop(place)
            self._promise(table, other.weight(number) + lease.weight(number) - before)
        return other

    def end(self, lease: PageLease | None) -> None:
        """Let go what one of a lease's owners held; the last ends it."""
        if lease is None:
            return
        lease.num_owners -= 1
        if lease.num_owners:
            return
        for number, (_, table) in enumerate(self._groups):
            for place in sorted(lease.held[number]):
                self._let_go(lease, number, place, is_passed=False)
            self._promise(table, -lease.quotas[number])

    def fill(self, blocks: Iterable[int]) -> None:
        """Note that these blocks have got the pages of all groups, which are whole."""
        for block in blocks:
            for _, table in self._groups:
                table.fill(block)

    def free_idle(self, block: int) -> None:
        """Take note that nobody finds a block any more: pages of it that nobody holds are free."""
        for _, table in self._groups:
            if not table.is_whole:
                table.free_idle(block)

    def forget(self, blocks: Sequence[int]) -> None:
        """Take note that the content of these blocks is void."""
        for _, table in self._groups:
            table.forget(blocks)

    def check(self, leases: Iterable[PageLease]) -> None:
        """Raise AssertionError if pages are not held as these leases, all that are open, say."""
        known = list(leases)
        for number, (_, table) in enumerate(self._groups):
            table.check(Counter(block for lease in known for block in lease.held[number].values()))
            promised = 0 if table.is_whole else sum(lease.weight(number) for lease in known)
            assert table.promised == promised, f"{table.promised} pages are promised, {promised} to known leases"

    def _snapshots(self, lease: PageLease, needed_at: int, end: int, start: int) -> list[int]:
        """Return the blocks, from `start` on, whose states computing tokens `needed_at` to `end` takes.

        Those that it reads and ends with come first. The others can be done without: the last full block, and those at
        whose end others go on, or would.
        """
        size = self._layout.block_size
        needed = [start, self._layout.num_blocks(end) - 1] if needed_at else [self._layout.num_blocks(end) - 1]
        branches = [branch - 1 for branch in lease.branches if needed_at < branch * size <= end]
        drafted = range(needed_at // size, needed[-1]) if self._may_be_drafted(needed_at, end) else ()
        wanted = dict.fromkeys([*needed, *drafted, end // size - 1, *branches])
        return [place for place in wanted if start <= place <= needed[-1]]

    def _may_be_drafted(self, needed_at: int, end: int) -> bool:
        """Return whether these may be a newest token and its draft: a state may end in any of their blocks."""
        return 1 < end - needed_at <= 1 + self._num_draft_tokens

    def _has_room(self, lease: PageLease, number: int) -> bool:
        """Return whether a lease may hold one page more."""
        table = self._groups[number][1]
        return table.is_whole or len(lease.held[number]) < lease.quotas[number] or table.num_spare > 0

    def _pass(self, lease: PageLease, number: int, start: int) -> None:
        """Let go the pages before block `start`, but for those that are pinned."""
        index = self._groups[number][0]
        kept = range(0) if lease.pinned is None else self._places(index, lease.pinned)
        branches = [range(self._start(index, end), end) for end in lease.branches]
        for place in [place for place in lease.held[number] if place < start and place not in kept]:
            self._let_go(lease, number, place, is_passed=not any(place in branch for branch in branches))

    def _let_go(self, lease: PageLease, number: int, place: int, is_passed: bool) -> None:
        table, before = self._groups[number][1], lease.weight(number)
        table.let_go(lease.held[number].pop(place), is_passed)
        self._promise(table, lease.weight(number) - before)

    def _promise(self, table: GroupPageTable, count: int) -> None:
        """Promise so many pages more, or fewer."""
        if not table.is_whole:
            table.promised += count
            self.num_gains += count < 0

    def _quotas(self, num_tokens: int, num_more: int = 0) -> list[int]:
        """Return the pages of each group that a sequence may have, `num_more` beside what it needs."""
        most = self._layout.num_blocks(num_tokens + self._num_draft_tokens)
        needs = [pages_of_sequence(self._layout, index, self._num_draft_tokens) for index, _ in self._groups]
        return [
            0 if table.is_whole else min(most, need + num_more)
            for need, (_, table) in zip(needs, self._groups, strict=True)
        ]

    def _places(self, index: int, pinned: range) -> range:
        """Return the blocks that are pinned in a group; see PageLease."""
        first = self._start(index, pinned.start // self._layout.block_size)
        return range(first, self._layout.num_blocks(pinned.stop))

    def _start(self, index: int, num_blocks: int) -> int:
        """Return the first block whose page a continuation behind so many needs."""
        size = self._layout.block_size
        return self._layout.first_needed(index, num_blocks * size) // size


def no_groups(block_size: int) -> KVGroups:
    """Return the groups of short life of a model that has none."""
    layout = KVLayout.uniform(
        model="", num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32"
    )
    return KVGroups(layout, ())


def pages_of_sequence(layout: KVLayout, index: int, num_draft_tokens: int = 0) -> int:
    """Return the pages of a group of short life that decoding takes, with drafts of so many tokens."""
    return (layout.most_blocks(index) or 0) + layout.num_blocks(num_draft_tokens)


def _gaps(table: GroupPageTable, blocks: Sequence[int]) -> list[int]:
    """Return for each block the place of the last one up to it that has no page, or -1."""
    places = np.arange(len(blocks))
    return np.maximum.accumulate(np.where(table.page_of[list(blocks)] == ABSENT, places, -1)).tolist()
