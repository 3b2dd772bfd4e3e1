"""The paged KV cache: one allocation, seen as torch tensors by the model and as bytes by the transfer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from contracts.ids import BlockId
from contracts.layout import KVLayout
from engine.cache.group_page_table import ABSENT, GroupPageTable

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class CachePart:
    """The pages of one group, and which of them a block has: that of its number if there is no `table`."""

    cache: "KVCache"
    table: GroupPageTable | None = None

    def read_pages(self, tables: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return the pages of blocks `[N, n]`, each row those of a sequence.

        Where one has none, it is that of the row's block at `columns` `[N]`, which has one. What is read there is
        masked, but a NaN in a page of somebody else's would show nevertheless.
        """
        if self.table is None:
            return tables
        pages = self.table.page_of[tables].astype(np.int64)
        return np.where(pages == ABSENT, np.take_along_axis(pages, columns[:, None], axis=1), pages)

    def written_pages(self, blocks: np.ndarray) -> np.ndarray:
        """Return the pages of blocks, which have one."""
        if self.table is None:
            return blocks
        pages = self.table.page_of[blocks].astype(np.int64)
        assert pages.min(initial=0) >= 0, "a token is written to a block that has no page"
        return pages


class KVCache:
    """The pages of all layers.

    `[num_planes, num_blocks, page]`, plane 2 * layer is K and 2 * layer + 1 is V, page `[kv_heads, block, head_dim]`. A
    latent is one plane a layer. `group` is the layout's only one, and no `state`.
    """

    state = None

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout, self.group = layout, layout.only_group
        self.num_blocks = num_blocks
        self.dtype = TORCH_DTYPES[self.group.dtype]
        group = self.group
        pages_THD = (
            group.num_layers,
            len(group.planes),
            num_blocks,
            group.num_kv_heads,
            group.block_size,
            group.head_dim,
        )
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

    def part(self, has_window: bool) -> CachePart:
        """Return the only group, which all layers are of."""
        return CachePart(self)

    def rows(self, layer: int) -> torch.Tensor:
        """Return K and V of a layer by rows.

        `[planes * num_blocks * kv_heads * block, head_dim]`: where one head of one token is written.
        """
        return self._data[layer].view(-1, self.group.head_dim)

    def pages(self, layer: int) -> torch.Tensor:
        """K and V of a layer as `[planes * num_blocks * kv_heads, block * head_dim]`: what attention gathers."""
        return self._data[layer].view(-1, self.group.block_size * self.group.head_dim)
