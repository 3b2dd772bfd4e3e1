"""The cache of a draft head: pages that are addressed by the target's block ids."""

import torch

from contracts.layout import KVGroup, KVLayout
from engine.cpu.kv_cache import KVCache
from models.eagle3 import Eagle3Config


def draft_layout(target: KVLayout, config: Eagle3Config, weights: str) -> KVLayout:
    """Return how a head's KV lies in pages beside its target's; `weights` is the fingerprint of the head."""
    group = KVGroup(
        kind="draft",
        layers=tuple(range(config.num_layers)),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=target.block_size,
        dtype=target.only_group.dtype,
        weights=weights,
    )
    return KVLayout(model=target.model, block_size=target.block_size, groups=(group,))


def draft_nbytes(layout: KVLayout, config: Eagle3Config) -> int:
    """Return the bytes that a block takes here: KV, and the feature of its newest token."""
    return layout.block_nbytes + config.hidden_size * layout.only_group.page_nbytes(1) // _page_items(layout)


def _page_items(layout: KVLayout) -> int:
    group = layout.only_group
    return group.num_kv_heads * group.block_size * group.head_dim


class DraftCache:
    """KV of the head, and of each block the feature of its newest token.

    Slot j of a sequence holds what the head made of token j and the target's rows of token j - 1, so a block depends on
    the tokens up to its end alone; slot 0 is empty. The first slot of the next block needs the feature of this one's
    last token, hence `features_NH` `[num_blocks, hidden]`, in the number format of the KV.

    Behind the blocks there are `num_spare` more, for drafts that run beyond the blocks of their sequence.
    """

    def __init__(self, layout: KVLayout, config: Eagle3Config, num_blocks: int, num_spare: int) -> None:
        self.num_blocks, self.num_spare = num_blocks, num_spare
        self.kv = KVCache(layout, num_blocks + num_spare)
        self.features_NH = torch.zeros(num_blocks, config.hidden_size, dtype=self.kv.dtype)
