"""The paged KV cache: one allocation, seen as torch tensors by the model and as bytes by the transfer."""

from collections.abc import Sequence

import numpy as np
import torch

from contracts.ids import BlockId
from contracts.layout import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KVCache:
    """The pages of all layers.

    `[num_planes, num_blocks, page]`, plane 2 * layer is K and 2 * layer + 1 is V, page `[kv_heads, block, head_dim]`.
    `group` is the layout's only one.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout, self.group = layout, layout.only_group
        self.num_blocks = num_blocks
        self.dtype = TORCH_DTYPES[self.group.dtype]
        group = self.group
        pages_THD = (group.num_layers, 2, num_blocks, group.num_kv_heads, group.block_size, group.head_dim)
        # Written once now: what the cache was promised is taken from the system before the first request, so that
        # memory runs short, if it does, at start, and the next worker to size its cache sees what is really left.
        raw = torch.empty(layout.block_nbytes * num_blocks, dtype=torch.uint8).zero_()
        self._data = raw.view(self.dtype).view(pages_THD)

    @property
    def pool_bytes(self) -> np.ndarray:
        """`[num_planes, num_blocks, page_nbytes]` uint8, the same memory."""
        flat = self._data.view(self.group.num_planes, self.num_blocks, -1)
        return flat.view(torch.uint8).numpy()

    @property
    def transfer_pool(self) -> np.ndarray:
        return self.pool_bytes

    def checksums(self, blocks: Sequence[BlockId]) -> None:
        """The transfer makes its own, of what it copies anyway."""

    def checksums_behind(self, blocks: Sequence[BlockId]) -> None:
        """All blocks are computed."""

    def rows(self, layer: int) -> torch.Tensor:
        """Return K and V of a layer by rows.

        `[2 * num_blocks * kv_heads * block, head_dim]`: where one head of one token is written.
        """
        return self._data[layer].view(-1, self.group.head_dim)

    def pages(self, layer: int) -> torch.Tensor:
        """K and V of a layer as `[2 * num_blocks * kv_heads, block * head_dim]`: what attention gathers."""
        return self._data[layer].view(-1, self.group.block_size * self.group.head_dim)
