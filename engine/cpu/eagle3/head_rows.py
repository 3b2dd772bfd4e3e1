"""The rows that a drafting head computes, and its interface: EAGLE3, or multi-token prediction."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


@dataclass(frozen=True)
class HeadRows:
    """M rows of S sequences, those of one side by side in order.

    Row i has `features_MH[i]`, what is known of the token before (fused from the target, or the head's own row), and
    the token `tokens_M[i]`, whose place in its sequence is `slots_M[i]`, 1 at least: that is where its K and V go.
    `owners_M`: rows of `tables_SN`, blocks. A row sees the slots of its sequence from `seen_from_S` on.
    """

    features_MH: torch.Tensor
    tokens_M: np.ndarray
    slots_M: np.ndarray
    owners_M: np.ndarray
    tables_SN: np.ndarray
    seen_from_S: np.ndarray

    @property
    def lasts_S(self) -> np.ndarray:
        """Return the last row of each sequence."""
        return np.flatnonzero(np.diff(self.owners_M, append=-1))


@dataclass(frozen=True)
class HeadOutput:
    """What the last row of each sequence says.

    `logits` `[S, draft_vocab]` are of what follows its token, `features_SH` for the row of that.
    """

    logits: torch.Tensor
    features_SH: torch.Tensor


class DraftingHead(Protocol):
    """A head with its weights, over a draft cache."""

    targets: np.ndarray
    """`[draft_vocab]` the target's token of each that is drafted."""

    def fuse(self, aux_MA: torch.Tensor) -> torch.Tensor:
        """Return the features `[M, hidden]` of tokens by the target's rows of them.

        Both are float32; `aux_MA` is `[M, fc_width]`.
        """
        ...

    def write(self, rows: HeadRows) -> None:
        """Write K and V of the rows in all layers."""
        ...

    def forward(self, rows: HeadRows) -> HeadOutput:
        """Do the same, and compute what the last row of each sequence says."""
        ...
