"""The tokens that grammars allow next, as packed bits, and the memory that they are worked out in."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from contracts.ids import RequestId
from engine.sequence import Sequence


@dataclass(frozen=True)
class GuidedRows:
    """The rows of a batch that have a grammar.

    `index` is (rows, places), and of `rows[i]` the bits are `bits[places[i]]`. Without an index they are all rows, in
    the order of the bits.
    """

    bits: Tensor
    index: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class TokenMasks:
    """The masks of a batch: `bits` `[n, nbytes]` uint8, those of a request at `rows[request]`.

    They are where the logits are. There is a bit for each token of the tokenizer, the lowest first. In `errors` is why
    a grammar can't go on.
    """

    bits: Tensor = field(default_factory=lambda: torch.empty((0, 0), dtype=torch.uint8))
    rows: Mapping[RequestId, int] = field(default_factory=dict)
    errors: Mapping[RequestId, str] = field(default_factory=dict)

    def guided(self, sequences: SequenceOf[Sequence]) -> GuidedRows | None:
        """Return those of the sequences that have a mask, or None if none has."""
        if not self.rows:
            return None
        found = [(row, self.rows[s.request_id]) for row, s in enumerate(sequences) if s.request_id in self.rows]
        if not found:
            return None
        if found == [(row, row) for row in range(len(sequences))] and len(sequences) == len(self.bits):
            return GuidedRows(self.bits)
        return GuidedRows(self.bits, tuple(np.array(column, np.int64) for column in zip(*found, strict=True)))


NO_MASKS = TokenMasks()


class MaskMemory:
    """The memory that masks are written to. Both calls come from the thread that works them out."""

    def allocate(self, num_rows: int, nbytes: int) -> Tensor:
        """Return `[num_rows, nbytes]` uint8 on the host, for a batch that nobody has the masks of yet."""
        return torch.empty((num_rows, nbytes), dtype=torch.uint8)

    def upload(self, bits: Tensor) -> Tensor:
        """Return the bits where the logits are."""
        return bits
