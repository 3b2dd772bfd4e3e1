"""A mixture of experts on the CPU.

Each row goes through the few that its router scores highest (Shazeer et al. 2017).

A row's result does not depend, to the bit, on the rows beside it where a linear layer's does not: experts see rows
padded as linear layers pad them, and what they give is added up in the order of a row's own choices.

Shapes: M rows, K experts of a row, H hidden size.
"""

from collections.abc import Sequence

import torch

from engine.cpu.expert_router import ExpertRouter
from engine.cpu.linear import Linear
from engine.cpu.mlp import CpuMlp


class CpuGatedExpert:
    """An expert that all rows go through, times a sigmoid of a row's own score (Qwen2-MoE)."""

    def __init__(self, gate: Linear, expert: CpuMlp) -> None:
        self._gate, self._expert = gate, expert
        self.is_uniform = expert.is_uniform

    def __call__(self, x: torch.Tensor, num_answer_rows: int) -> torch.Tensor:
        # Not torch.sigmoid, whose last few elements of a thread's share take another exponential than the others.
        return self._expert(x, num_answer_rows) / (1 + torch.exp(-self._gate(x).float()))


class CpuMoE:
    """A mixture; `shared` is an expert that all rows go through besides, if there is one."""

    def __init__(self, router: ExpertRouter, experts: Sequence[CpuMlp], shared: CpuMlp | None = None) -> None:
        self._router, self._experts, self._shared = router, experts, shared
        self.is_uniform = all(expert.is_uniform for expert in (*experts, *((shared,) if shared else ())))

    def __call__(self, x: torch.Tensor, num_answer_rows: int) -> torch.Tensor:
        if not len(x):  # a chunk that ends no prompt goes no further than the last attention
            return x
        weights_MK, ids_MK = self._router(x)
        total = _weighted_sum(_through(self._experts, x, ids_MK, num_answer_rows), weights_MK)
        return total if self._shared is None else total + self._shared(x, num_answer_rows)


class CpuSharedExpertMoE:
    """The mixture of Llama 4.

    A row goes through a shared expert and, times a sigmoid of its score, through the one of the others that the router
    scores highest.
    """

    def __init__(self, router: Linear, experts: Sequence[CpuMlp], shared: CpuMlp) -> None:
        self._router, self._experts, self._shared = router, experts, shared
        self.is_uniform = all(expert.is_uniform for expert in (shared, *experts))

    def __call__(self, x: torch.Tensor, num_answer_rows: int) -> torch.Tensor:
        if not len(x):
            return x
        scores_M1, ids_M1 = self._router(x).float().max(-1, keepdim=True)
        # Not torch.sigmoid, whose last few elements of a thread's share take another exponential than the others.
        scaled = x / (1 + torch.exp(-scores_M1))
        return self._shared(x, num_answer_rows) + _through(self._experts, scaled, ids_M1, num_answer_rows)[:, 0]


def _through(experts: Sequence[CpuMlp], x: torch.Tensor, ids_MK: torch.Tensor, num_answer_rows: int) -> torch.Tensor:
    """`[M, K, H]`: what each row's experts make of it."""
    order = ids_MK.flatten().argsort(stable=True)
    counts = ids_MK.flatten().bincount(minlength=len(experts)).tolist()
    groups = zip(experts, x[order // ids_MK.shape[1]].split(counts), strict=True)
    y = torch.cat([expert(rows, len(rows) if num_answer_rows else 0) for expert, rows in groups if len(rows)])
    return torch.empty_like(y).index_copy_(0, order, y).view(*ids_MK.shape, -1)


def _weighted_sum(y_MKH: torch.Tensor, weights_MK: torch.Tensor) -> torch.Tensor:
    total = y_MKH[:, 0] * weights_MK[:, :1]
    for choice in range(1, y_MKH.shape[1]):
        total += y_MKH[:, choice] * weights_MK[:, choice : choice + 1]
    return total
