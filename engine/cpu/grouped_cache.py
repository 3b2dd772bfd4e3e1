"""The paged KV cache of a model whose layers are several groups, each with pages of its own."""

from collections.abc import Sequence

import numpy as np
import torch

from contracts.ids import BlockId
from contracts.layout import KVLayout
from engine.cache.group_page_table import GroupPageTable
from engine.cpu.kv_cache import CachePart, KVCache
from engine.cpu.state_cache import StateCache


class GroupedKVCache:
    """The pages of all layers, group by group.

    See engine.backend.PagedCache, and KVCache for what the layers see. `tables`: which pages blocks have in the groups
    of short life, in the layout's order; there is one such group at most, and one other. `state`: of recurrent layers,
    if there are any.
    """

    state: StateCache | None = None

    def __init__(self, layout: KVLayout, num_blocks: int, tables: Sequence[GroupPageTable] = ()) -> None:
        self.layout, self.num_blocks = layout, num_blocks
        tables_left = list(tables)
        self._parts: dict[bool, CachePart] = {}
        self._of_layer: dict[int, tuple[KVCache, int]] = {}
        caches: list[KVCache | StateCache] = []
        for index, group in enumerate(layout.groups):
            table = tables_left.pop(0) if group.is_short else None
            if group.is_state:
                assert table is not None, "blocks have no pages for states"
                self.state = StateCache(group, table)
                caches.append(self.state)
                continue
            cache = KVCache(layout.of_groups([index]), num_blocks if table is None else table.num_pages)
            assert group.is_short not in self._parts, "two groups see the same part of a context"
            self._parts[group.is_short] = CachePart(cache, table)
            caches.append(cache)
            self._of_layer |= {layer: (cache, place) for place, layer in enumerate(group.layers)}
        self._caches = caches
        self.dtype = next(iter(self._parts.values())).cache.dtype

    def part(self, has_window: bool) -> CachePart:
        """Return the group of the layers that see a window or segment, or of the others; of a sole group that."""
        return self._parts.get(has_window) or self._parts[not has_window]

    @property
    def pool_bytes(self) -> np.ndarray:
        """The pages of the first group."""
        return self._caches[0].pool_bytes

    @property
    def transfer_pool(self) -> np.ndarray | list[np.ndarray]:
        """The pages of all groups, in the layout's order; those of a sole group themselves."""
        pools = [cache.pool_bytes for cache in self._caches]
        return pools if len(pools) > 1 else pools[0]

    def checksums(self, blocks: Sequence[BlockId]) -> None:
        """The transfer makes its own, of what it copies anyway."""

    def checksums_behind(self, blocks: Sequence[BlockId]) -> None:
        """All blocks are computed."""

    def rows(self, layer: int) -> torch.Tensor:
        """Return K and V of a layer by rows, as KVCache.rows does."""
        cache, place = self._of_layer[layer]
        return cache.rows(place)

    def pages(self, layer: int) -> torch.Tensor:
        """Return K and V of a layer by pages, as KVCache.pages does."""
        cache, place = self._of_layer[layer]
        return cache.pages(place)


AnyKVCache = GroupedKVCache | KVCache
"""What layers are computed over: a model's groups, or one group that all its layers are of, as a draft model's."""
