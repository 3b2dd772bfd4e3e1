"""The caches of a model and of a draft head as one, whose blocks move and are kept whole."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from contracts.ids import BlockId
from contracts.layout import KVGroup
from engine.cpu.grouped_cache import AnyKVCache


@dataclass(frozen=True)
class GroupPages:
    """The pages of one group: `pages` uint8 `[num_planes, num_blocks, page_nbytes]`, C-contiguous."""

    group: KVGroup
    pages: np.ndarray


class JointCache:
    """A model's cache, and beside it groups whose pages have the same block ids.

    See engine.backend.PagedCache. Block i of `beside` belongs to block i of `model`; what they have behind its last
    block is none of a transfer's.
    """

    def __init__(self, model: AnyKVCache, beside: Sequence[GroupPages]) -> None:
        self._model, self._beside = model, list(beside)
        groups = (*model.layout.groups, *(each.group for each in beside))
        self.layout = msgspec.structs.replace(model.layout, groups=groups)
        self.num_blocks = model.num_blocks

    @property
    def pool_bytes(self) -> np.ndarray:
        """The pages of the model's first group."""
        return self._model.pool_bytes

    @property
    def transfer_pool(self) -> list[np.ndarray]:
        """The pages of all groups, in the layout's order."""
        model = self._model.transfer_pool
        return [*(model if isinstance(model, list) else [model]), *(each.pages for each in self._beside)]

    def checksums(self, blocks: Sequence[BlockId]) -> None:
        """The transfer makes its own, of what it copies anyway."""

    def checksums_behind(self, blocks: Sequence[BlockId]) -> None:
        """All blocks are computed."""
