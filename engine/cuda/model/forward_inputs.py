"""The rows of a pass through the model, and the attention that a layer is given for them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from engine.cuda.kv.kv_cache import LayerCache
from engine.cuda.model.weights import AttentionWindow


@dataclass(frozen=True)
class QueryRows:
    """The queries of a layer.

    `[T, heads, D]`: `plain` as attention of decodes reads them, `of_prompts` as that of prompts does. A row has what
    its own attention reads.
    """

    plain: Tensor
    of_prompts: Tensor

    def __getitem__(self, rows: slice) -> "QueryRows":
        return QueryRows(self.plain[rows], self.of_prompts[rows])


Attend = Callable[[QueryRows, LayerCache, Tensor, AttentionWindow], None]
"""(queries, cache of one layer, out `[T, heads, D]`, what a layer's rows see): attention of the rows over their own
sequences.
"""


Advance = Callable[[int], None]
"""Transformer.advance of a layer, for rows that it knows."""


@dataclass(frozen=True)
class Rows:
    """`token_ids`, `positions`, `slots` `[T]`, the slot -1 for a row that only pads.

    `num_decodes` `[1]` int32: so many of the first are of decodes, whose attention reads other queries.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    num_decodes: Tensor
