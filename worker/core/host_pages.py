"""A pool in the host's memory as the tiers below it see it: whole blocks, of all groups of layers."""

from collections.abc import Sequence

import numpy as np


class HostPages:
    """The pools of a cache's groups, in the layout's order.

    Each is uint8 `[num_planes, num_blocks, page_nbytes]`. A block's bytes are those of its pages, group by group and in
    each plane by plane.
    """

    def __init__(self, pools: Sequence[np.ndarray]) -> None:
        self._pools = list(pools)
        self._starts = np.cumsum([0, *(pool.shape[0] * pool.shape[2] for pool in pools)]).tolist()

    def read(self, block: int, into: np.ndarray) -> None:
        """Copy a block's bytes into uint8 of their number."""
        for pool, part in zip(self._pools, self._parts(into), strict=True):
            part.reshape(pool.shape[0], pool.shape[2])[:] = pool[:, block]

    def write(self, block: int, payload: np.ndarray) -> None:
        """Copy uint8 of a block's bytes into its pages."""
        for pool, part in zip(self._pools, self._parts(payload), strict=True):
            pool[:, block] = part.reshape(pool.shape[0], pool.shape[2])

    def _parts(self, payload: np.ndarray) -> list[np.ndarray]:
        """Return the views of each group's bytes."""
        return [payload[start:end] for start, end in zip(self._starts, self._starts[1:], strict=False)]
