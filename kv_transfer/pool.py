"""The KV pool as bytes: gathering scattered pages into a buffer and back."""

import numpy as np

from contracts.layout import KVLayout


class PagePool:
    """`pages`: uint8 `[num_planes, num_blocks, page_nbytes]`, C-contiguous, shared. Raises ValueError on
    another shape.
    """

    def __init__(self, pages: np.ndarray, layout: KVLayout) -> None:
        if pages.dtype != np.uint8 or pages.ndim != 3 or not pages.flags.c_contiguous:
            raise ValueError("the pool must be a C-contiguous uint8 array [num_planes, num_blocks, page_nbytes]")
        if (pages.shape[0], pages.shape[2]) != (layout.num_planes, layout.page_nbytes):
            raise ValueError(
                f"the pool is {pages.shape}; the layout has {layout.num_planes} planes of {layout.page_nbytes} bytes"
            )
        self.num_planes, self.num_blocks, self.page_nbytes = pages.shape
        self._rows = pages.reshape(-1, self.page_nbytes)

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy the pages of `rows` (see plan.row_ids) into `out`, uint8 of their total size."""
        # mode="clip" lets numpy write straight into `out`; the caller has checked the bounds.
        np.take(self._rows, rows, axis=0, out=out.reshape(-1, self.page_nbytes), mode="clip")

    def scatter(self, rows: np.ndarray, data: np.ndarray) -> None:
        self._rows[rows] = data.reshape(-1, self.page_nbytes)
