"""The pages that a transfer test moves: a host's, or a device's for nvlink and where KV_TEST_POOL=device. Only the
latter load torch, which takes a new process seconds.
"""

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from contracts.layout import KVLayout
from kv_transfer.node import TransferNode


class PoolOwner:
    """A node and the pages `[num_planes, num_blocks, bytes in all shards]` of each group that it moves.

    `devices` hold them if there are any; `device` and `pool` are the first group's.
    """

    node: TransferNode

    def __init__(
        self, name: str, pages: Sequence[np.ndarray], layout: KVLayout, transport: object, pool: Any = None
    ) -> None:
        self._pages, self.devices = pages, []
        if pool is not None or transport == "nvlink" or os.environ.get("KV_TEST_POOL") == "device":
            from tests.kv_transfer import kv_device

            self._kv_device = kv_device
            for each, group in zip(pages, layout.groups, strict=True):
                alone = msgspec.structs.replace(layout, block_size=group.block_size, groups=(group,))
                self.devices.append(pool or kv_device.device_pool(name, each, alone))
        if transport == "ucx" and self.device is not None:
            from kv_transfer.transports import ucx_device

            ucx_device.SLOT_NBYTES = 1 << 18  # so that a chunk takes several

    def close(self) -> None:
        """pytest holds a test's objects until the next one has begun: the descriptor is given back now."""
        self.node.close()
        for device in self.devices:
            self._kv_device.close_pool(device)

    @property
    def device(self) -> Any:
        return self.devices[0] if self.devices else None

    @property
    def pools(self) -> list[Any]:
        """Return what a TransferNode takes."""
        return self.devices or list(self._pages)

    @property
    def pool(self) -> np.ndarray:
        return self.pool_of(0)

    def pool_of(self, group: int) -> np.ndarray:
        return self._kv_device.host_view(self.devices[group]) if self.devices else self._pages[group]
