"""What follows attention in a layer: a gated MLP."""

import math
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.cpu.linear import PhasedLinear
from engine.cpu.lora import LayerLora

# No more than BFloat16PromptLinear multiplies at a time, so that gate and up, several times as wide as what goes in,
# are not joined from parts before they are used: a prompt of 1024 tokens takes 4 % less with AMX.
_PART_ROWS = 512


class CpuMlp(Protocol):
    @property
    def is_uniform(self) -> bool:
        """One format for the rows of prompts and of answers."""
        ...

    def __call__(self, x: torch.Tensor, num_answer_rows: int) -> torch.Tensor:
        """`[M, H]` -> `[M, H]`.

        Where formats differ, either all rows or none belong to answers: `num_answer_rows`.
        """
        ...


class GatedMlp:
    def __init__(self, gate_up: PhasedLinear, down: PhasedLinear) -> None:
        self._gate_up, self._down = gate_up, down
        self.is_uniform = gate_up.is_uniform and down.is_uniform

    def __call__(self, x: torch.Tensor, num_answer_rows: int, lora: LayerLora | None = None) -> torch.Tensor:
        """See CpuMlp. `lora`: which rows adapters change, if any."""
        if len(x) <= _PART_ROWS:
            return self._part(x, num_answer_rows, lora)
        starts = range(0, len(x), _PART_ROWS)
        loras = [None if lora is None else lora.between(start, start + _PART_ROWS) for start in starts]
        parts = zip(x.split(_PART_ROWS), loras, strict=True)
        return torch.cat([self._part(rows, len(rows) if num_answer_rows else 0, own) for rows, own in parts])

    def _part(self, x: torch.Tensor, num_answer_rows: int, lora: LayerLora | None) -> torch.Tensor:
        gate_up = self._gate_up(x, num_answer_rows)
        if lora is not None:
            gate_up = lora.add("gate_up", x, gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        inner = self._activate(gate, up)
        y = self._down(inner, num_answer_rows)
        return y if lora is None else lora.add("down", inner, y)

    def _activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if gate.dtype is not torch.float32:
            return F.silu(gate).mul_(up)
        # Not F.silu, whose last few elements of a thread's share take another exponential than the others.
        return torch.exp(-gate).add_(1).reciprocal_().mul_(gate).mul_(up)


class GeluMlp(GatedMlp):
    """Gemma's: the gate goes through the tanh form of GELU (Hendrycks and Gimpel 2016)."""

    def _activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)). Not F.gelu, whose last few elements of a thread's share take
        # another tanh than the others.
        gate = gate.float()
        cubic = gate * gate * gate
        u = cubic.mul_(0.044715).add_(gate).mul_(-2 * math.sqrt(2 / math.pi))
        return torch.exp(u).add_(1).reciprocal_().mul_(gate).mul_(up)


class ClampedMlp(GatedMlp):
    """gpt-oss's: (up + 1) * gate * sigmoid(1.702 * gate), gate at most 7, up within 7."""

    def _activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.float().clamp(max=7.0), up.float().clamp(-7.0, 7.0)
        # Not torch.sigmoid, whose last few elements of a thread's share take another exponential than the others.
        return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
