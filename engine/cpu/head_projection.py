"""What a layer makes of its input for attention: q, and the K and V that are written."""

from typing import Protocol

import torch

from engine.cpu.linear import PhasedLinear
from engine.cpu.lora import LayerLora
from engine.cpu.norms import JointRmsNorm, RmsNorm
from models.config import ModelConfig


class Projection(Protocol):
    def __call__(
        self, x: torch.Tensor, turns: torch.Tensor, num_answer_rows: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q `[M, H, D]` and what is kept of each row, `[M, heads, D]`, in `dtype`.

        `x` `[M, hidden]` is normalised; `turns` complex64 are the rotations of the rows, see engine.cpu.decoder.
        """
        ...


class HeadProjection:
    """Grouped-query attention: rows of q and k are interleaved, see engine.cpu.decoder.

    Q and k of each head have norms in some families; `q_gain` and `k_gain` are their gains.
    """

    def __init__(
        self, config: ModelConfig, qkv: PhasedLinear, q_gain: torch.Tensor | None, k_gain: torch.Tensor | None
    ) -> None:
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._qkv, self._q_gain, self._k_gain = qkv, q_gain, k_gain
        self._q_norm, self._k_norm = _head_norms(config)

    def __call__(
        self,
        x: torch.Tensor,
        turns: torch.Tensor,
        num_answer_rows: int,
        dtype: torch.dtype,
        lora: LayerLora | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Projection. `lora`: which rows adapters change, if any."""
        qkv = self._qkv(x, num_answer_rows)
        if lora is not None:
            qkv = lora.add("qkv", x, qkv)
        qkv_MHD = qkv.float().view(len(x), -1, self._head_dim)
        if self._q_gain is not None:
            qkv_MHD = self._normalised(qkv_MHD)
        pairs = torch.view_as_complex(qkv_MHD.view(len(x), qkv_MHD.shape[1], -1, 2))
        turned = torch.view_as_real(pairs * turns).view_as(qkv_MHD).to(dtype)
        return turned[:, : self._num_heads], turned[:, self._num_heads :]

    def _normalised(self, qkv_MHD: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv_MHD.split([self._num_heads, self._num_kv_heads, self._num_kv_heads], 1)
        return torch.cat([self._q_norm(q, self._q_gain), self._k_norm(k, self._k_gain), v], 1)


def _head_norms(config: ModelConfig) -> tuple[RmsNorm, RmsNorm]:
    """Return the norms of q and of k."""
    if not config.joint_qk_norm:
        norm = RmsNorm(config.head_dim, config.norm_eps)
        return norm, norm
    q, k = (JointRmsNorm(count * config.head_dim, config.norm_eps) for count in (config.num_heads, config.num_kv_heads))
    return q, k
