"""The pages that a transfer test moves: a host's, or a device's for nvlink and where KV_TEST_POOL=device. Only the
latter load torch, which takes a new process seconds.
"""

import os
from typing import Any

import numpy as np

from contracts.layout import KVLayout
from kv_transfer.node import TransferNode


class PoolOwner:
    """A node and the pages `[num_planes, num_blocks, bytes in all shards]` that it moves; `device` holds them if there
    is one.
    """

    node: TransferNode

    def __init__(self, name: str, pages: np.ndarray, layout: KVLayout, transport: object, pool: Any = None) -> None:
        self._pages, self.device = pages, None
        if pool is not None or transport == "nvlink" or os.environ.get("KV_TEST_POOL") == "device":
            from tests.kv_transfer import kv_device

            self._kv_device = kv_device
            self.device = pool or kv_device.device_pool(name, pages, layout)
        if transport == "ucx" and self.device is not None:
            from kv_transfer.transports import ucx_device

            ucx_device.SLOT_NBYTES = 1 << 18  # so that a chunk takes several

    def close(self) -> None:
        """pytest holds a test's objects until the next one has begun: the descriptor is given back now."""
        self.node.close()
        if self.device is not None:
            self._kv_device.close_pool(self.device)

    @property
    def pool(self) -> np.ndarray:
        return self._kv_device.host_view(self.device) if self.device is not None else self._pages
