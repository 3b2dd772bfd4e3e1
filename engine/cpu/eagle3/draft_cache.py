"""The cache of a draft head: pages that are addressed by the target's block ids."""

from functools import cached_property

import msgspec
import numpy as np
import torch

from contracts.layout import ITEM_NBYTES, KVGroup, KVLayout
from engine.cpu.joint_cache import GroupPages
from engine.cpu.kv_cache import KVCache
from engine.speculative.proposer import spare_blocks

_PRESENCE_NBYTES = 4
"""The end of a block's row: int32, see engine.speculative.draft_presence."""


def draft_layout(target: KVLayout, kv: KVGroup, hidden_size: int) -> KVLayout:
    """Return how a head's state lies in pages beside its target's.

    It has two groups: its `kv`, and of each block a row with the feature of its newest token, `hidden_size` numbers,
    and what of it the head has read.
    """
    row = msgspec.structs.replace(
        kv,
        kind="draft_row",
        layers=(0,),
        planes=("row",),
        num_kv_heads=1,
        head_dim=hidden_size + _PRESENCE_NBYTES // ITEM_NBYTES[kv.dtype],
    )
    return KVLayout(model=target.model, block_size=target.block_size, groups=(kv, row))


class DraftCache:
    """KV of the head, and of each block the feature of its newest token.

    Slot j of a sequence holds what the head made of token j and the target's rows of token j - 1, so a block depends on
    the tokens up to its end alone; slot 0 is empty. The first slot of the next block needs the feature of this one's
    last token, hence `features_NH` `[num_blocks, hidden]`, in the number format of the KV. `presence_N` `[num_blocks]`
    int32 belongs to engine.speculative.draft_presence. Both lie in pages, so they go where a block's KV goes.

    Behind the blocks there are `num_spare` more, for drafts that run beyond the blocks of their sequence.
    """

    @classmethod
    def beside(cls, layout: KVLayout, hidden_size: int, num_blocks: int, max_num_seqs: int) -> "DraftCache":
        """Return a cache with as many spare blocks as so many sequences at once may draft into."""
        return cls(layout, hidden_size, num_blocks, max_num_seqs * spare_blocks(layout.block_size))

    def __init__(self, layout: KVLayout, hidden_size: int, num_blocks: int, num_spare: int) -> None:
        self.num_blocks, self._layout = num_blocks, layout
        self.kv = KVCache(layout.of_groups([0]), num_blocks + num_spare)
        self._rows = np.zeros((1, num_blocks, layout.groups[1].page_nbytes(1)), np.uint8)
        self.features_NH = torch.from_numpy(self._rows[0]).view(self.kv.dtype)[:, :hidden_size]
        self.presence_N: np.ndarray = self._rows[0, :, -_PRESENCE_NBYTES:].view(np.int32)[:, 0]

    @cached_property
    def pages(self) -> list[GroupPages]:
        """The pages of both groups, for whoever moves or keeps blocks."""
        kv, row = self._layout.groups
        return [GroupPages(kv, self.kv.pool_bytes), GroupPages(row, self._rows)]
