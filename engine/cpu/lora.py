"""What LoRA adapters add to the rows of a batch.

For each adapter that is in it there are two small products beside each of the model's. They are float32 in every number
format, and a row's are the same to the bit, whatever else is in the batch.

Shapes: M rows of the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from engine.cpu.linear import Float32Linear
from engine.scheduler.batch import ScheduledChunk

LoraPart = Literal["qkv", "output", "gate_up", "down"]
"""The products of a layer that an adapter may change, as in decoder_tensors.PARTS."""
_MLP = ("gate_up", "down")


class LoraPair:
    """The two products of an adapter beside one of the model's.

    `down` `[rank, in]`, `up` `[out, rank]`, scaled.
    """

    def __init__(self, down: torch.Tensor, up: torch.Tensor) -> None:
        self._down, self._up = Float32Linear(down, None), Float32Linear(up, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._up(self._down(x))


@dataclass(frozen=True, eq=False)
class CpuLora:
    """An adapter's products, by layer and part."""

    layers: tuple[Mapping[str, LoraPair], ...]


class LoraRows:
    """The rows of a batch, or of a part of it, by the adapter that changes them.

    `owners_M`: which of `adapters`, -1 for none.
    """

    def __init__(self, adapters: Sequence[CpuLora], owners_M: torch.Tensor) -> None:
        self._adapters, self._owners_M = adapters, owners_M
        self._parts: dict[tuple[int, int], LoraRows] = {}
        self._rows: dict[tuple[int, ...], tuple[torch.Tensor | None, list[int]]] = {}
        self.groups: list[tuple[CpuLora, torch.Tensor]] = []
        for number, adapter in enumerate(adapters):
            rows = (owners_M == number).nonzero()[:, 0]
            if len(rows):
                self.groups.append((adapter, rows))

    def __len__(self) -> int:
        return len(self._owners_M)

    def at(self, rows: torch.Tensor) -> "LoraRows":
        """Return these rows alone, in this order."""
        return LoraRows(self._adapters, self._owners_M.index_select(0, rows))

    def between(self, first: int, end: int) -> "LoraRows":
        """Return the rows from one to before another."""
        if (first, end) not in self._parts:
            self._parts[first, end] = LoraRows(self._adapters, self._owners_M[first:end])
        return self._parts[first, end]

    def add(self, layer: int, part: LoraPart, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add what adapters make of the rows of `x` `[M, in]` to those of `y` `[M, out]`, in place."""
        pairs = tuple(adapter.layers[layer].get(part) for adapter, _ in self.groups)
        changed = tuple(number for number, pair in enumerate(pairs) if pair is not None)
        if not changed:
            return y
        rows, counts = self._rows_of(changed)
        chosen = x if rows is None else x.index_select(0, rows)
        added = [pair(own) for pair, own in zip(filter(None, pairs), chosen.split(counts), strict=True)]
        total = (added[0] if len(added) == 1 else torch.cat(added)).to(y.dtype)
        return y.add_(total) if rows is None else y.index_add_(0, rows, total)

    def _rows_of(self, groups: tuple[int, ...]) -> tuple[torch.Tensor | None, list[int]]:
        """Return the rows of these groups, one group after the other, and how many each has.

        None for all rows in their order.
        """
        if groups not in self._rows:
            rows = [self.groups[number][1] for number in groups]
            together = torch.cat(rows)
            is_all = torch.equal(together, torch.arange(len(self)))
            self._rows[groups] = None if is_all else together, [len(own) for own in rows]
        return self._rows[groups]


@dataclass(frozen=True)
class LayerLora:
    """The rows of a batch in one layer."""

    rows: LoraRows
    layer: int

    def at(self, rows: torch.Tensor) -> "LayerLora":
        """See LoraRows.at."""
        return LayerLora(self.rows.at(rows), self.layer)

    def between(self, first: int, end: int) -> "LayerLora":
        """See LoraRows.between."""
        return LayerLora(self.rows.between(first, end), self.layer)

    def add(self, part: LoraPart, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See LoraRows.add."""
        return self.rows.add(self.layer, part, x, y)

    @property
    def has_mlp(self) -> bool:
        """Return whether an adapter changes this layer's MLP; it does not where that is a mixture of experts."""
        return any(not adapter.layers[self.layer].keys().isdisjoint(_MLP) for adapter, _ in self.rows.groups)


def lora_rows(pieces: Sequence[ScheduledChunk]) -> LoraRows | None:
    """Return which adapters the rows of a batch have, None if they have none.

    Rows are in the order of batch_inputs.prepare.
    """
    loaded = [piece.sequence.adapter for piece in pieces]
    if not any(loaded):
        return None
    numbers = {adapter: number for number, adapter in enumerate(dict.fromkeys(each for each in loaded if each))}
    owners = np.repeat(
        [-1 if adapter is None else numbers[adapter] for adapter in loaded], [piece.num_rows for piece in pieces]
    )
    return LoraRows([adapter.weights for adapter in numbers], torch.from_numpy(owners))
