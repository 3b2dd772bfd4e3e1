"""Products: dequantize, multiply in fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.layouts import block_of, join_nibbles
from kernels.reference.quant import (
    dequantize_blocks,
    dequantize_groups,
    dequantize_mxfp4,
    dequantize_nvfp4,
    dequantize_rows,
    e2m1_values,
    quantize,
    quantize_groups,
)
from kernels.specs import FP4Spec, GateUpSpec, GemmSpec, W4Spec, W8Spec


def gemm_fp8(spec: GemmSpec, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor) -> None:
    x, weight = operands(spec, a, w, a_scale, w_scale)
    share = spec.k // spec.parts
    parts = [x[:, i * share : (i + 1) * share] @ weight[:, i * share : (i + 1) * share].t() for i in range(spec.parts)]
    out.copy_(torch.stack(parts).view_as(out))


def operands(spec: GemmSpec, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor) -> tuple[Tensor, Tensor]:
    tokens = a.shape[0]
    if spec.deferred:
        return a.float(), w.float()
    if spec.recipe == "tensor":
        return a.float() * a_scale, w.float() * w_scale
    if spec.recipe == "row":
        return a.float() * a_scale[:tokens, None], dequantize_rows(w, w_scale)
    x = (a.float().view(tokens, -1, 128) * a_scale.t()[:tokens, :, None]).view(tokens, -1)
    return x, dequantize_rows(w, w_scale) if spec.recipe == "group" else dequantize_blocks(w, w_scale)


def gemm_gate_up(
    spec: GateUpSpec, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor, out_scale: Tensor
) -> None:
    x = a.float() * a_scale[: a.shape[0], None]
    gate, up = (x @ dequantize_rows(w, w_scale).t()).chunk(2, -1)
    y = F.silu(gate) * up
    if spec.quant == "group":
        quantize_groups(y, 128, out, out_scale)
    else:
        quantize(y, spec.quant, out, out_scale)


def gemm_w4(
    spec: W4Spec, a: Tensor, w: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, workspace: Tensor
) -> None:
    out.copy_(a.float() @ dequantize_w4(spec, w, scale, zero).t())


def dequantize_w4(spec: W4Spec, w: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """[n, k] fp32 from the split layout of kernels.layouts; scale and zero are [n, k / group]."""
    codes = join_nibbles(w, block_of(spec.format)).long()
    if spec.format == "mxfp4":
        values = e2m1_values(codes).view(spec.n, -1, 32)
        return (values * torch.exp2(scale.float() - 127)[..., None]).view(spec.n, spec.k)
    offset = 8.0 if zero is None else zero.float()[..., None]
    return ((codes.float().view(spec.n, -1, spec.group) - offset) * scale.float()[..., None]).view(spec.n, spec.k)


def gemm_w8(spec: W8Spec, a: Tensor, w: Tensor, scale: Tensor, out: Tensor, workspace: Tensor) -> None:
    dequantize = {"row": dequantize_rows, "group32": dequantize_groups, "block128": dequantize_blocks}[spec.recipe]
    out.copy_(a.float() @ dequantize(w, scale).t())


def gemm_fp4(
    spec: FP4Spec, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor, *, alpha: float = 1.0
) -> None:
    dequantize = dequantize_nvfp4 if spec.format == "nvfp4" else dequantize_mxfp4
    out.copy_(dequantize(a, a_scale) @ dequantize(w, w_scale).t() * alpha)
