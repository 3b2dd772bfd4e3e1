"""Which tokens of the cache's blocks a draft model has read."""

from collections.abc import Sequence as SequenceOf

import numpy as np


class DraftPresence:
    """The tokens that were computed on this worker, with the draft model beside.

    What came by a handoff or from a lower tier was not. So a sequence has a run of such tokens, up to its newest; for
    each block the first of them is kept.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._first = np.full(num_blocks, block_size, np.int32)

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
        """Return the token from which on all up to `end` were computed here.

        It is `end` if the one before it was not.
        """
        firsts = self._first[np.array(blocks[: -(-end // self._size)], np.int64)]
        cut = np.flatnonzero(firsts)
        return min(end, int(cut[-1]) * self._size + int(firsts[cut[-1]])) if len(cut) else 0
