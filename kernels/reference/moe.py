"""Mixture of experts: routing, and the layer as a loop over experts.

Every token goes through every expert, and weighs nothing where it was not sent: nothing is read on the host."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.layouts import unpair_gate_up, untile_mxfp4
from kernels.reference.quant import dequantize_rows, mxfp4_values, to_e4m3, token_scale
from kernels.specs import MoESpec
from kernels.workspace import group_width


def moe_route(spec: MoESpec, logits: Tensor, weights: Tensor, ids: Tensor, *, bias: Tensor | None = None) -> None:
    """The top_k experts of each token, the lower index first among equals, and their weights.

    Bias [experts] is added to the logits first.
    """
    logits = logits.float() if bias is None else logits.float() + bias.float()
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    best, chosen = order.values[:, : spec.top_k], order.indices[:, : spec.top_k]
    if spec.scoring == "sigmoid":
        score = torch.sigmoid(best)
        score = score / score.sum(-1, keepdim=True) if spec.renormalize and spec.top_k > 1 else score
    else:
        score = best.softmax(-1) if spec.renormalize else logits.softmax(-1).gather(1, chosen)
    weights.copy_(score)
    ids.copy_(chosen)


def moe_experts(
    spec: MoESpec, x: Tensor, x_scale: Tensor, weights: Tensor, ids: Tensor, w1: Tensor, w1_scale: Tensor, w2: Tensor,
    w2_scale: Tensor, out: Tensor, workspace: Tensor, *, b1: Tensor | None = None, b2: Tensor | None = None,
) -> None:  # fmt: skip
    """b1 [experts, 2 * inter] and b2 [experts, hidden] are added to the products.

    Scales are read where the weights have them, x_scale with e4m3 tokens.
    """
    hidden = x.float() * x_scale[:, None] if spec.weights == "e4m3" else x.float()
    total = torch.zeros(x.shape[0], spec.hidden, device=x.device)
    for expert in range(spec.experts):
        share = torch.where(ids == expert, weights, 0.0).sum(-1, keepdim=True)
        gate_up = dense(spec, w1[expert], w1_scale[expert])
        both = hidden @ (unpair_gate_up(gate_up) if spec.weights == "mxfp4" else gate_up).t()
        gate, up = (both if b1 is None else both + b1[expert].float()).chunk(2, -1)
        middle = round_middle(spec, activate(spec, gate, up))
        y = middle @ dense(spec, w2[expert], w2_scale[expert]).t()
        y = y if b2 is None else y + b2[expert].float()
        total += y * share
    out.copy_(total)


def dense(spec: MoESpec, w: Tensor, scale: Tensor) -> Tensor:
    """One expert's weights in fp32."""
    if spec.weights == "e4m3":
        return dequantize_rows(w, scale)
    if spec.weights != "mxfp4":
        return w.float()
    return mxfp4_values(*untile_mxfp4(w, scale))


def round_middle(spec: MoESpec, y: Tensor) -> Tensor:
    """The middle as the second product reads it.

    E4m3 by groups, like plain weights, or bf16 beside 4-bit ones.
    """
    if spec.weights == "e4m3":
        return round_groups(y, group_width(spec))
    return y if spec.weights == "fp32" else y.bfloat16().float()


def activate(spec: MoESpec, gate: Tensor, up: Tensor) -> Tensor:
    """SiLU, or gpt-oss's clamped form: (up + 1) * gate * sigmoid(1.702 gate), gate at most 7, up within 7."""
    if spec.activation == "silu":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def round_groups(y: Tensor, group: int) -> Tensor:
    """The middle as e4m3 with one scale per token and group would give it back."""
    grouped = y.view(y.shape[0], -1, group)
    scale = token_scale(grouped)[..., None]
    return (to_e4m3(grouped / scale).float() * scale).view_as(y)
