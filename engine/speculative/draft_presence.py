"""Which tokens of the cache's blocks a draft model has read."""

from collections.abc import Sequence as SequenceOf

import numpy as np


class DraftPresence:
    """The tokens that were computed with the draft model beside, here or where their block came from.

    What came without its pages was not. So a sequence has a run of such tokens, up to its newest; for each block the
    first of them is kept, in `first_N` `[num_blocks]` int32, which moves with the block's pages.
    """

    def __init__(self, first_N: np.ndarray, block_size: int) -> None:
        self._size, self._first = block_size, first_N
        first_N[:] = block_size

    def forget(self, blocks: SequenceOf[int]) -> None:
        """Note that nothing is known of what these blocks hold."""
        self._first[np.asarray(blocks, np.int64)] = self._size

    def add(self, blocks: SequenceOf[int], first: int, end: int) -> None:
        """Note that tokens `[first, end)` of a sequence that has these blocks were computed."""
        within = np.array(blocks[first // self._size : -(-end // self._size)], np.int64)
        begin = min(int(self._first[within[0]]), first % self._size)
        self._first[within] = 0
        self._first[within[0]] = begin

    def run_start(self, blocks: SequenceOf[int], end: int) -> int:
        """Return the token from which on all up to `end` were read.

        It is `end` if the one before it was not.
        """
        # Within bounds whatever a peer wrote: attention begins there.
        firsts = self._first[np.array(blocks[: -(-end // self._size)], np.int64)].clip(0, self._size)
        cut = np.flatnonzero(firsts)
        return min(end, int(cut[-1]) * self._size + int(firsts[cut[-1]])) if len(cut) else 0
