"""The pages of one group of layers that live shorter than a sequence, and which blocks have them."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np

ABSENT = -1


class GroupPageTable:
    """The pages of one group of short life, and which block has which of them.

    `page_of` int32 `[num_blocks]`: the page of a block, or ABSENT; a cache reads it. A page is held, or idle (its block
    may be found again), or free. Idle pages that a sequence has passed are evicted before those at which one ended, or
    from which another went on.

    If the cache `is_whole`, there is a page for every block, of the same number, and none is ever evicted.
    """

    def __init__(self, num_blocks: int, num_pages: int) -> None:
        self.num_pages = min(num_pages, num_blocks)
        self.is_whole = self.num_pages == num_blocks
        self.page_of = np.full(num_blocks, ABSENT, np.int32)
        self.promised = 0
        """The pages that leases may hold at most, together; those that several hold are counted for each."""
        self._block_of = [ABSENT] * self.num_pages
        self._holds = [0] * self.num_pages
        self._free = dict.fromkeys(range(self.num_pages - 1, -1, -1))
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_spare(self) -> int:
        """Return the pages that are not promised to anybody."""
        return self.num_pages - self.promised

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free) - len(self._passed) - len(self._kept)

    @property
    def num_cached(self) -> int:
        """Return the pages that nobody holds, and that may be found again."""
        return len(self._passed) + len(self._kept)

    def hold(self, block: int) -> None:
        """Hold the page of a block, a new one if it has none; its content is undefined then."""
        page = int(self.page_of[block])
        if page == ABSENT:
            page = self._take(block)
            self.page_of[block], self._block_of[page] = page, block
        elif not self._holds[page]:
            (self._kept if page in self._kept else self._passed).pop(page)
        self._holds[page] += 1

    def let_go(self, block: int, is_passed: bool) -> None:
        """Drop a hold. The last makes the page idle, as one that was passed or not."""
        page = int(self.page_of[block])
        assert page != ABSENT and self._holds[page] > 0, f"block {block} let go more often than held"
        self._holds[page] -= 1
        if self._holds[page] == 0:
            (self._passed if is_passed else self._kept)[page] = None

    def fill(self, block: int) -> None:
        """Note that a block's page has its content, without a hold; of a cache that is whole."""
        assert self.is_whole, "a page that nobody holds would be evicted"
        if self.page_of[block] == ABSENT:
            self.hold(block)
            self.let_go(block, is_passed=True)

    def forget(self, blocks: Iterable[int]) -> None:
        """Free the pages of blocks whose content is void; nobody holds them."""
        for block in blocks:
            if (page := int(self.page_of[block])) != ABSENT:
                assert not self._holds[page], f"block {block} is emptied, and its page {page} is held"
                (self._kept if page in self._kept else self._passed).pop(page)
                self._detach(page)
                self._free[page] = None

    def free_idle(self, block: int) -> None:
        """Free the page of a block that nobody will find again, unless somebody holds it."""
        page = int(self.page_of[block])
        if page != ABSENT and not self._holds[page]:
            self.forget((block,))

    def check(self, expected: Counter[int]) -> None:
        """Raise AssertionError unless each page is in one state, and held as often as `expected` of its block."""
        idle = Counter([*self._free, *self._passed, *self._kept])
        for page, holds in enumerate(self._holds):
            block = self._block_of[page]
            assert idle[page] == (0 if holds else 1), f"page {page}: {holds} holds, idle {idle[page]} times"
            assert (block == ABSENT) == (page in self._free), f"page {page} is free with block {block}, or not without"
            assert block == ABSENT or self.page_of[block] == page, f"block {block} has not page {page}"
            assert not self.is_whole or block in (ABSENT, page), f"block {block} has page {page} of a whole cache"
            assert holds == (0 if block == ABSENT else expected[block]), f"block {block} is held {holds} times"
        assert (self.page_of != ABSENT).sum() == sum(block != ABSENT for block in self._block_of)
        assert self.is_whole or self.promised <= self.num_pages, f"{self.promised} of {self.num_pages} pages promised"

    def _take(self, block: int) -> int:
        if self.is_whole:
            del self._free[block]
            return block
        if self._free:
            return self._free.popitem()[0]
        idle = self._passed or self._kept
        assert idle, "more pages are held than were promised"
        page = idle.popitem(last=False)[0]
        self._detach(page)
        return page

    def _detach(self, page: int) -> None:
        self.page_of[self._block_of[page]] = ABSENT
        self._block_of[page] = ABSENT
