"""The KV pool in host memory, as bytes: pages are gathered into a buffer and scattered back."""

from collections.abc import Sequence

import numpy as np

from contracts.ids import BlockId
from contracts.layout import KVLayout


class PagePool:
    """A pool of one group over pages that it shares.

    `pages`: uint8 `[num_planes, num_blocks, page_nbytes]`, C-contiguous.

    Raises ValueError on another shape, or a layout of several shards: a host's pool has one.
    """

    def __init__(self, pages: np.ndarray, layout: KVLayout, index: int = 0) -> None:
        if pages.dtype != np.uint8 or pages.ndim != 3 or not pages.flags.c_contiguous:
            raise ValueError("the pool must be a C-contiguous uint8 array [num_planes, num_blocks, page_nbytes]")
        if layout.tp_size != 1:
            raise ValueError(f"the layout has {layout.tp_size} shards")
        group = layout.groups[index]
        num_planes, page_nbytes = group.num_planes, group.page_nbytes(1)
        if (pages.shape[0], pages.shape[2]) != (num_planes, page_nbytes):
            raise ValueError(f"the pool is {pages.shape}; the layout has {num_planes} planes of {page_nbytes} bytes")
        self.num_planes, self.num_blocks, self.page_nbytes = pages.shape
        self.block_nbytes = group.block_nbytes
        self._rows = pages.reshape(-1, self.page_nbytes)

    def agreed(self, num_parts: int, sends: bool) -> None:
        """Accept any number of parts: host pages need no preparation."""

    def in_parts(self, sums: np.ndarray, pages: Sequence[BlockId], num_parts: int) -> np.ndarray:
        return sums

    def gather(self, rows: np.ndarray, out: np.ndarray, num_parts: int = 1) -> None:
        """Copy the pages of `rows` (see chunk_plan.row_ids) into `out`, uint8 of their total size."""
        # mode="clip" lets numpy write straight into `out`; the caller has checked the bounds.
        np.take(self._rows, rows, axis=0, out=out.reshape(-1, self.page_nbytes), mode="clip")

    def scatter(self, rows: np.ndarray, data: np.ndarray, num_parts: int = 1) -> None:
        self._rows[rows] = data.reshape(-1, self.page_nbytes)
