"""The checksum of a page from those of its parts, which lie in the memories of several GPUs.

A page's words lie in rows of check_block() columns (kernels.reference.move.checksums). Side by side, equal parts make
up the page: each is whole rows of it, or a piece of one row, whose columns count from where it begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels.reference.move import FACTOR, check_block

_WORD_NBYTES = 4


@dataclass(frozen=True)
class PartSums:
    """The parts of a page in order.

    `first_columns`: the column at which each begins; `factors`, uint32: what its sum is multiplied by.
    """

    first_columns: Sequence[int]
    factors: np.ndarray

    def join(self, sums: np.ndarray) -> np.ndarray:
        """Return the checksums of pages, uint32 `[...]`, from those of their parts, uint32 `[..., parts]`."""
        return (sums * self.factors).sum(axis=-1, dtype=np.uint32)


def part_sums(page_nbytes: int, num_shards: int) -> PartSums:
    """Return the parts into which pages in so many shards are cut to be summed up.

    They are a shard's, or smaller ones. `page_nbytes`: of all shards. Raises ValueError if shards can't be of one size,
    or are no 32-bit words.
    """
    num_words, rest = divmod(page_nbytes, _WORD_NBYTES * num_shards)
    if rest:
        raise ValueError(f"pages of {page_nbytes} bytes can't be cut into {num_shards} shards of 32-bit words")
    num_columns = check_block(page_nbytes)
    if num_words % num_columns:
        num_words = check_block(_WORD_NBYTES * num_words)
    num_rows = page_nbytes // _WORD_NBYTES // num_columns
    starts = range(0, page_nbytes // _WORD_NBYTES, num_words)
    rows_behind = [num_rows - -(-(start + num_words) // num_columns) for start in starts]
    factors = np.array([pow(FACTOR, count, 1 << 32) for count in rows_behind], np.uint32)
    return PartSums([start % num_columns for start in starts], factors)
