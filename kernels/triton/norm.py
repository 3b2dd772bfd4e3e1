# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""RMSNorm with residual, split-K sum, deferred scales and quantization in one launch.

Quantization; SiLU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.specs import NormSpec, QuantSpec, SiluSpec
from kernels.triton.common import LOG2E, PDL, pdl_launch, pdl_start, pdl_wait, reciprocal, to_e4m3, token_scale


@triton.jit
def sum_and_max(total_a, peak_a, total_b, peak_b):
    """Combine two (sum, largest): one round through shared memory instead of two."""
    return total_a + total_b, tl.maximum(peak_a, peak_b)


@triton.jit
def store_groups(out_ptr, scale_ptr, y, row, group, num_tokens, N: tl.constexpr):
    """A row's groups [groups, 128] in e4m3, and the scale of each, as [N / 128, tokens]."""
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    scale = token_scale(tl.max(tl.abs(y), 1))
    tl.store(scale_ptr + group.to(tl.int64) * num_tokens + row, scale, mask=group * 128 < N)
    tl.store(out_ptr + row.to(tl.int64) * N + col, to_e4m3(y / scale[:, None]), mask=col < N)


@triton.jit(do_not_specialize=["num_tokens"])
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, ids_ptr, out_ptr, scale_ptr, token_scale_ptr, channel_scale_ptr, bias_ptr, eps,
    num_tokens,
    N: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EMBED: tl.constexpr, RESIDUAL: tl.constexpr,
    DEFERRED: tl.constexpr, BIASED: tl.constexpr, QUANT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < N
    pdl_start(PDL)
    gain = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    if BIASED:
        bias = tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    value = tl.zeros([BLOCK], tl.float32)
    if EMBED:
        value += tl.load(x_ptr + tl.load(ids_ptr + row).to(tl.int64) * N + col, mask=mask, other=0.0).to(tl.float32)
    else:
        for part in tl.static_range(PARTS):
            value += tl.load(x_ptr + (part * num_tokens + row).to(tl.int64) * N + col, mask=mask, other=0.0).to(
                tl.float32
            )
        if DEFERRED:
            value = value * tl.load(channel_scale_ptr + col, mask=mask, other=0.0) * tl.load(token_scale_ptr + row)
        if BIASED:
            value += bias
        if RESIDUAL:
            value += tl.load(residual_ptr + row.to(tl.int64) * N + col, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        rounded = value.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row.to(tl.int64) * N + col, rounded, mask=mask)
        value = rounded.to(tl.float32)  # the norm sees what the residual holds, as an unfused pair would
    squares, peak = tl.reduce((value * value, tl.abs(value * gain)), 0, sum_and_max)
    r = tl.rsqrt(squares / N + eps)
    y = value * r * gain
    if QUANT == 0:
        tl.store(out_ptr + row.to(tl.int64) * N + col, y.to(out_ptr.dtype.element_ty), mask=mask)
    elif QUANT == 3:
        y = tl.reshape(y, (BLOCK // 128, 128))
        store_groups(out_ptr, scale_ptr, y, row, tl.arange(0, BLOCK // 128), num_tokens, N)
    else:
        if QUANT == 1:
            scale = token_scale(peak * r)
            tl.store(scale_ptr + row, scale)
        else:
            scale = tl.load(scale_ptr)
        tl.store(out_ptr + row.to(tl.int64) * N + col, to_e4m3(y / scale), mask=mask)


@triton.jit
def quant_kernel(
    x_ptr, out_ptr, scale_ptr, N: tl.constexpr, BLOCK: tl.constexpr, QUANT: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < N
    pdl_start(PDL)
    pdl_wait(PDL)
    y = tl.load(x_ptr + row.to(tl.int64) * N + col, mask=mask, other=0.0).to(tl.float32)
    if QUANT == 1:
        scale = token_scale(tl.max(tl.abs(y), 0))
        tl.store(scale_ptr + row, scale)
    else:
        scale = tl.load(scale_ptr)
    tl.store(out_ptr + row.to(tl.int64) * N + col, to_e4m3(y / scale), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def quant_groups_kernel(
    x_ptr, out_ptr, scale_ptr, num_tokens, N: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr
):
    """A program rounds GROUPS of them."""
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    pdl_start(PDL)
    pdl_wait(PDL)
    y = tl.load(x_ptr + row.to(tl.int64) * N + col, mask=col < N, other=0.0).to(tl.float32)
    store_groups(out_ptr, scale_ptr, y, row, group, num_tokens, N)


@triton.jit(do_not_specialize=["num_tokens"])
def silu_kernel(
    x_ptr, out_ptr, scale_ptr, token_scale_ptr, channel_scale_ptr, num_tokens,
    N: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, DEFERRED: tl.constexpr, QUANT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program takes PIECES times BLOCK columns.

    Where each row has a scale of its own the row, kept in registers.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * PIECES * BLOCK + tl.arange(0, BLOCK)
    pdl_start(PDL)
    pdl_wait(PDL)
    factor = tl.load(token_scale_ptr + row) if DEFERRED else 1.0
    middle, peak = (), tl.zeros([BLOCK], tl.float32)
    for piece in tl.static_range(PIECES):
        y = gated(x_ptr + row * 2 * N, channel_scale_ptr, first + piece * BLOCK, factor, N, N % BLOCK > 0, DEFERRED)
        peak = tl.maximum(peak, tl.abs(y))
        middle += (y,)
    square = factor * factor
    multiplier = square
    if QUANT == 1:
        scale = token_scale(tl.max(peak, 0) * square)
        tl.store(scale_ptr + row, scale)
        multiplier = square / scale
    elif QUANT == 2:
        multiplier = square / tl.load(scale_ptr)
    for piece in tl.static_range(PIECES):
        col = first + piece * BLOCK
        y = middle[piece] * multiplier
        if QUANT == 3:
            group = (tl.program_id(1) * PIECES + piece) * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
            store_groups(out_ptr, scale_ptr, tl.reshape(y, (BLOCK // 128, 128)), row, group, num_tokens, N)
        else:
            if QUANT == 2:
                y = to_e4m3(y)  # a scale of the row's own keeps it within the range
            tl.store(out_ptr + row * N + col, y.to(out_ptr.dtype.element_ty), mask=col < N if N % BLOCK > 0 else None)


@triton.jit
def gated(x_ptr, channel_scale_ptr, col, factor, N: tl.constexpr, MASK: tl.constexpr, DEFERRED: tl.constexpr):
    """Return silu(gate) * up over the square of the token's factor.

    That is applied once, with the scale: 18 instructions an element, and 35 with divisions and factors one by one
    (machine code for Hopper).
    """
    mask = col < N if MASK else None
    gate = tl.load(x_ptr + col, mask=mask).to(tl.float32)
    up = tl.load(x_ptr + N + col, mask=mask).to(tl.float32)
    if DEFERRED:
        gate = gate * tl.load(channel_scale_ptr + col, mask=mask)
        up = up * tl.load(channel_scale_ptr + N + col, mask=mask)
    y = gate * reciprocal(1.0 + tl.exp2(gate * (factor * -LOG2E))) * up
    return tl.where(mask, y, 0.0) if MASK else y


MODE = {"none": 0, "token": 1, "tensor": 2, "group": 3}


def add_rmsnorm_quant(
    spec: NormSpec, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, scale: Tensor,
    *, ids: Tensor | None = None, token_scale: Tensor | None = None, channel_scale: Tensor | None = None,
    bias: Tensor | None = None, pdl: bool = PDL, num_warps: int = 0,
) -> None:  # fmt: skip
    tokens = out.shape[0]
    # 32 warps on a row win while the card is not full, then the smaller block does (0.04 ms of a step), until memory is
    # the limit: 512, 2048 and 8192 rows take 5.1, 16.9 and 60.8 us with 16 warps, 6.6, 18.9 and 62.5 with 4 (H200).
    warps = num_warps or (32 if tokens <= 64 else 4 if tokens <= 256 else 16)
    norm_kernel[(tokens,)](
        x, weight if residual is None else residual, weight, scale if ids is None else ids, out, scale,
        scale if token_scale is None else token_scale, scale if channel_scale is None else channel_scale,
        weight if bias is None else bias, eps, tokens,
        N=spec.hidden, BLOCK=triton.next_power_of_2(spec.hidden), PARTS=spec.parts, EMBED=spec.embed,
        RESIDUAL=spec.residual, DEFERRED=spec.deferred, BIASED=spec.biased, QUANT=MODE[spec.quant],
        PDL=pdl, num_warps=warps, **pdl_launch(pdl),
    )  # fmt: skip


def quant_fp8(spec: QuantSpec, x: Tensor, out: Tensor, scale: Tensor, *, pdl: bool = PDL) -> None:
    if spec.quant == "group":
        groups = min(16, triton.next_power_of_2(spec.width // 128))
        quant_groups_kernel[(x.shape[0], triton.cdiv(spec.width, 128 * groups))](
            x, out, scale, x.shape[0], N=spec.width, GROUPS=groups, PDL=pdl, num_warps=4, **pdl_launch(pdl)
        )
        return
    quant_kernel[(x.shape[0],)](
        x, out, scale, N=spec.width, BLOCK=triton.next_power_of_2(spec.width), QUANT=MODE[spec.quant],
        PDL=pdl, num_warps=8, **pdl_launch(pdl),
    )  # fmt: skip


def silu_mul_quant(
    spec: SiluSpec, x: Tensor, out: Tensor, scale: Tensor,
    *, token_scale: Tensor | None = None, channel_scale: Tensor | None = None, pdl: bool = PDL,
) -> None:  # fmt: skip
    whole_row = spec.quant == "token"
    block, warps, options = silu_plan(spec.width, whole_row)
    pieces = triton.cdiv(spec.width, block)
    silu_kernel[(x.shape[0], 1 if whole_row else pieces)](
        x, out, scale, scale if token_scale is None else token_scale, scale if channel_scale is None else channel_scale,
        len(x), N=spec.width, BLOCK=block, PIECES=pieces if whole_row else 1, DEFERRED=spec.deferred,
        QUANT=MODE[spec.quant], PDL=pdl, num_warps=warps, **options, **pdl_launch(pdl),
    )  # fmt: skip


def silu_plan(width: int, whole_row: bool) -> tuple[int, int, dict[str, int]]:
    """Columns of a piece, warps, launch options.

    Loads in flight are what a row of its own scale lacks: 8192 rows of 14336 take 151 us with 16 warps of 64 registers,
    two programs on a multiprocessor, 178 with as many registers as they want, 189 with 8 warps (H200).
    """
    block = min(2048 if width <= 16384 or not whole_row else 4096, triton.next_power_of_2(width))
    if not whole_row:
        return block, 8, {}
    return block, max(1, block // 128), {"maxnreg": 64}


@triton.jit(do_not_specialize_on_alignment=["index_ptr"])
def argmax_parts_kernel(
    x_ptr, best_ptr, index_ptr, N: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    col = part * BLOCK + tl.arange(0, BLOCK)
    pdl_start(PDL)
    pdl_wait(PDL)
    value = tl.load(x_ptr + row * N + col, mask=col < N, other=float("-inf")).to(tl.float32)
    # Beside a NaN the later of two is taken, and behind the last column or part lies what is no token.
    value = tl.where(value == value, value, float("-inf"))
    best, index = tl.max(value, 0, return_indices=True)
    tl.store(best_ptr + row * PARTS + part, best)
    tl.store(index_ptr + row * PARTS + part, index + part * BLOCK)


@triton.jit(do_not_specialize_on_alignment=["index_ptr", "out_ptr"])
def argmax_merge_kernel(best_ptr, index_ptr, out_ptr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    pdl_start(PDL)
    pdl_wait(PDL)
    value = tl.load(best_ptr + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    _, winner = tl.max(value, 0, return_indices=True)
    tl.store(out_ptr + row, tl.load(index_ptr + row * PARTS + winner).to(tl.int64))


def argmax(spec: QuantSpec, logits: Tensor, out: Tensor, workspace: Tensor, *, pdl: bool = PDL) -> None:
    tokens = logits.shape[0]
    block = triton.next_power_of_2(triton.cdiv(spec.width, 32 if tokens <= 32 else 8))
    parts = triton.cdiv(spec.width, block)
    best = workspace[: tokens * parts * 4].view(torch.float32)
    index = workspace[tokens * parts * 4 : tokens * parts * 8].view(torch.int32)
    argmax_parts_kernel[(tokens, parts)](
        logits, best, index, N=spec.width, BLOCK=block, PARTS=parts, PDL=pdl, num_warps=8, **pdl_launch(pdl)
    )
    argmax_merge_kernel[(tokens,)](
        best, index, out, PARTS=parts, BLOCK=triton.next_power_of_2(parts), PDL=pdl, num_warps=1, **pdl_launch(pdl)
    )
