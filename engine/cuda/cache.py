"""The paged KV cache on a GPU."""

import numpy as np
import torch

from contracts.errors import ConfigError
from contracts.layout import KVLayout


class DeviceCache:
    """`[num_planes, num_blocks + 1, kv_heads, block, head_dim]` in one allocation, plane 2 * layer K, 2 * layer + 1 V.

    The last block belongs to nobody: the rows that pad a batch write there.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        shape = (layout.num_planes, num_blocks + 1, layout.num_kv_heads, layout.block_size, layout.head_dim)
        # Zeros: what is masked weighs 0, and 0 times a NaN of uninitialised memory is a NaN.
        raw = torch.zeros(layout.block_nbytes * (num_blocks + 1), dtype=torch.uint8, device=device)
        self._planes = raw.view(dtype).view(shape)

    @property
    def pool_bytes(self) -> np.ndarray:
        raise ConfigError("the KV cache of a GPU can't be handed over yet: serve with device=cpu")

    def keys(self, layer: int) -> torch.Tensor:
        """`[num_blocks + 1, kv_heads, block, head_dim]`."""
        return self._planes[2 * layer]

    def values(self, layer: int) -> torch.Tensor:
        return self._planes[2 * layer + 1]
