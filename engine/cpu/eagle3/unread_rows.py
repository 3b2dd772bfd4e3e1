"""The target's rows of tokens that a head has yet to read."""

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True)
class BlockState:
    """A block, and how often it had been emptied: what was in it is there as long as that is so."""

    block: int
    generation: int


@dataclass
class UnreadRows:
    """The rows of tokens from `slot - 1` on, side by side: of these the slots from `slot` on are made.

    Of the first ones there are `features` `[m, H]` already, of the others `aux`, parts `[n, A]`. `slot`: the first that
    is not written; the one before it is in the block of `before`.
    """

    slot: int
    before: BlockState
    features: torch.Tensor
    aux: list[torch.Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The token behind the last that has a row."""
        return self.slot - 1 + len(self.features) + sum(map(len, self.aux))

    def cut(self, end: int) -> None:
        """Drop the rows from token `end` on, `slot - 1` at least: they were of wrong guesses."""
        left = end - (self.slot - 1)
        self.features = self.features[:left]
        left -= len(self.features)
        kept: list[torch.Tensor] = []
        for part in self.aux:
            kept.append(part[:left])
            left -= len(kept[-1])
        self.aux = kept

    def advance(self, slot: int, before: BlockState) -> None:
        """Take note that the slots before this one are written; all rows are features by now."""
        self.features = self.features[slot - self.slot :].clone()  # those of a long prompt are let go
        self.slot, self.before = slot, before


def newest_of_blocks(first: int, end: int, block_size: int) -> np.ndarray:
    """Return of tokens `[first, end)` the last in each block."""
    tokens = np.arange(first, end)
    return tokens[((tokens + 1) % block_size == 0) | (tokens == end - 1)]
