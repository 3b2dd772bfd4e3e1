"""The pools of a node's groups of layers, one for each."""

from collections.abc import Sequence

import numpy as np

from contracts.layout import KVLayout
from kv_transfer.chunks.device_pool import DevicePool, Pool
from kv_transfer.chunks.page_pool import PagePool
from kv_transfer.connection import layout_negotiation as conversion


def prepared_pools(
    pools: Sequence[np.ndarray | DevicePool], layout: KVLayout, checks: bool
) -> tuple[Sequence[Pool], Sequence[DevicePool]]:
    """Return the pool of each group, ready for peers, and those that are a device's.

    Raises ValueError if they do not fit the layout.
    """
    if len(pools) != len(layout.groups):
        raise ValueError(f"{len(pools)} pools do not fit a layout of {len(layout.groups)} groups")
    device = [pool for pool in pools if not isinstance(pool, np.ndarray)]
    for pool in device:
        pool.expect(conversion.part_counts(layout))
        pool.checks = checks
    every = [PagePool(pool, layout, i) if isinstance(pool, np.ndarray) else pool for i, pool in enumerate(pools)]
    return every, device
