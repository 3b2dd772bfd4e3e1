"""Products: dequantize, multiply in fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.layouts import untile_int4
from kernels.reference.quant import (
    dequantize_blocks,
    dequantize_groups,
    dequantize_rows,
    quantize,
)
from kernels.specs import GateUpSpec, GemmSpec, W4Spec, W8Spec


def gemm_fp8(spec: GemmSpec, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor) -> None:
    x, weight = operands(spec, a, w, a_scale, w_scale)
    in_parts(spec, x, weight, out)


def in_parts(spec: GemmSpec | W4Spec, x: Tensor, weight: Tensor, out: Tensor) -> None:
    shares = [slice(i * spec.share, (i + 1) * spec.share) for i in range(spec.parts)]
    parts = [x[:, share] @ weight[:, share].t() for share in shares]
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
    quantize(F.silu(gate) * up, spec.quant, out, out_scale)


def gemm_w4(spec: W4Spec, a: Tensor, w: Tensor, factors: Tensor, out: Tensor, workspace: Tensor) -> None:
    in_parts(spec, a.float(), dequantize_w4(w, factors), out)


def dequantize_w4(w: Tensor, factors: Tensor) -> Tensor:
    """[n, k] fp32 of kernels.layouts.tile_int4."""
    codes, scale, zero = untile_int4(w, factors)
    return ((codes.float().unflatten(1, (-1, 128)) - zero.float()[..., None]) * scale[..., None]).flatten(1)


def gemm_w8(spec: W8Spec, a: Tensor, w: Tensor, scale: Tensor, out: Tensor, workspace: Tensor) -> None:
    dequantize = {"row": dequantize_rows, "group32": dequantize_groups, "block128": dequantize_blocks}[spec.recipe]
    out.copy_(a.float() @ dequantize(w, scale).t())
