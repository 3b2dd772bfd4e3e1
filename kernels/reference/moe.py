"""Mixture of experts: routing, and the layer as a loop over experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference.gemm import dequantize_w4
from kernels.reference.quant import dequantize_rows, to_e4m3, token_scale
from kernels.specs import MoESpec, W4Spec


def moe_route(spec: MoESpec, logits: Tensor, weights: Tensor, ids: Tensor) -> None:
    """The top_k experts of each token, the lower index first among equals, and their weights."""
    order = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    best, chosen = order.values[:, : spec.top_k], order.indices[:, : spec.top_k]
    if spec.scoring == "sigmoid":
        score = torch.sigmoid(best)
        score = score / score.sum(-1, keepdim=True) if spec.renormalize and spec.top_k > 1 else score
    else:
        score = best.softmax(-1) if spec.renormalize else logits.float().softmax(-1).gather(1, chosen)
    weights.copy_(score)
    ids.copy_(chosen)


def moe_experts(
    spec: MoESpec, x: Tensor, x_scale: Tensor, weights: Tensor, ids: Tensor, w1: Tensor, w1_scale: Tensor, w2: Tensor,
    w2_scale: Tensor, out: Tensor, workspace: Tensor, *, b1: Tensor | None = None, b2: Tensor | None = None,
) -> None:  # fmt: skip
    """b1 [experts, 2 * inter] and b2 [experts, hidden] are added to the products; x_scale is read with e4m3 tokens."""
    hidden = x.float() if spec.weights == "mxfp4" else x.float() * x_scale[:, None]
    total = torch.zeros(x.shape[0], spec.hidden, device=x.device)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        both = hidden[token] @ dense(spec, w1[expert], w1_scale[expert]).t()
        gate, up = (both if b1 is None else both + b1[expert].float()).chunk(2, -1)
        middle = round_middle(spec, activate(spec, gate, up))
        y = middle @ dense(spec, w2[expert], w2_scale[expert]).t()
        y = y if b2 is None else y + b2[expert].float()
        total.index_add_(0, token, y * weights[token, slot][:, None])
    out.copy_(total)


def dense(spec: MoESpec, w: Tensor, scale: Tensor) -> Tensor:
    """One expert's weights in fp32."""
    if spec.weights == "e4m3":
        return dequantize_rows(w, scale)
    return dequantize_w4(W4Spec(w.shape[0], 2 * w.shape[1], "mxfp4", 32), w, scale, None)


def round_middle(spec: MoESpec, y: Tensor) -> Tensor:
    """The middle as the second product reads it: e4m3 by groups, or bf16 beside 4-bit weights."""
    return round_groups(y, group_width(spec)) if spec.weights == "e4m3" else y.bfloat16().float()


def activate(spec: MoESpec, gate: Tensor, up: Tensor) -> Tensor:
    """SiLU, or gpt-oss's clamped form: (up + 1) * gate * sigmoid(1.702 gate), gate at most 7, up within 7."""
    if spec.activation == "silu":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def group_width(spec: MoESpec) -> int:
    """Columns of the middle that share a scale: what divides both widths."""
    return 128 if spec.inter % 128 == 0 and spec.hidden % 128 == 0 else 64


def round_groups(y: Tensor, group: int) -> Tensor:
    """The middle as e4m3 with one scale per token and group would give it back."""
    grouped = y.view(y.shape[0], -1, group)
    scale = token_scale(grouped)[..., None]
    return (to_e4m3(grouped / scale).float() * scale).view_as(y)
