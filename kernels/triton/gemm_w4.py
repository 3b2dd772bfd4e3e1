# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""4-bit weights: INT4 (GPTQ, AWQ) and MXFP4 with bf16 activations everywhere; both sides FP4 on Blackwell.

A product of few tokens is a read of the weights, so widening a nibble may cost only a few instructions. Four bytes are
widened at once in 32-bit registers: an e2m1 code's bits moved into a bf16 are its value times 2^-126, and 0x4300 | code
is the bf16 128 + code, exactly. The scale then costs one packed multiplication.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.layouts import block_of
from kernels.plans import EMPTY, Plan, PlanTable
from kernels.specs import FP4Spec, W4Spec
from kernels.triton.common import store_part
from kernels.workspace import COUNTERS_NBYTES, WIDEN_TOKENS

PACKED = not triton.knobs.runtime.interpret  # the interpreter knows no inline assembly
MX_SHIFT = tl.constexpr(63)  # MXFP4 weights are kept times 2^-63, halfway between what overflows and what vanishes
UNSHIFT = tl.constexpr(float(2**63))

WIDEN_MX = """{
.reg .b32 a, b, s;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shl.b32 s, a, 12; and.b32 s, s, 0x80008000; shl.b32 $0, a, 6; lop3.b32 $0, $0, 0x01C001C0, s, 0xEA;
shl.b32 s, b, 12; and.b32 s, s, 0x80008000; shl.b32 $1, b, 6; lop3.b32 $1, $1, 0x01C001C0, s, 0xEA;
shl.b32 s, a, 8; and.b32 s, s, 0x80008000; shl.b32 $2, a, 2; lop3.b32 $2, $2, 0x01C001C0, s, 0xEA;
shl.b32 s, b, 8; and.b32 s, s, 0x80008000; shl.b32 $3, b, 2; lop3.b32 $3, $3, 0x01C001C0, s, 0xEA;
mul.bf16x2 $0, $0, $5; mul.bf16x2 $1, $1, $6; mul.bf16x2 $2, $2, $7; mul.bf16x2 $3, $3, $8;
}"""
WIDEN_INT4 = """{
.reg .b32 a, b;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
shr.u32 a, a, 4;
shr.u32 b, b, 4;
lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $3, b, 0x000F000F, 0x43004300, 0xEA;
sub.bf16x2 $0, $0, $5; sub.bf16x2 $1, $1, $6; sub.bf16x2 $2, $2, $5; sub.bf16x2 $3, $3, $6;
mul.bf16x2 $0, $0, $7; mul.bf16x2 $1, $1, $8; mul.bf16x2 $2, $2, $7; mul.bf16x2 $3, $3, $8;
}"""
ASM_MX, ASM_INT4 = tl.constexpr(WIDEN_MX), tl.constexpr(WIDEN_INT4)


@triton.jit
def exponent_scale(code):
    """The bf16 2^(code - 127 + MX_SHIFT) of a power-of-two exponent byte."""
    biased = tl.minimum(tl.maximum(code.to(tl.int32) + MX_SHIFT, 0), 254)
    return (biased << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def widen_mx(packed, s_low, s_high, PACKED: tl.constexpr):
    """Bytes [rows, k] and a bf16 scale per row for each nibble, to the low and the high nibbles' values * 2^-63."""
    if PACKED:
        s_low = tl.broadcast_to(s_low[:, None], packed.shape)
        s_high = tl.broadcast_to(s_high[:, None], packed.shape)
        low, high = tl.inline_asm_elementwise(
            ASM_MX, "=r,=r,=r,=r,r,r,r,r,r", [packed, s_low, s_high], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        code = packed.to(tl.int16)
        low = (((code & 7) << 6) | ((code & 8) << 12)).to(tl.bfloat16, bitcast=True).to(tl.float32)
        high = (((code & 0x70) << 2) | ((code & 0x80) << 8)).to(tl.bfloat16, bitcast=True).to(tl.float32)
        low = (low * s_low.to(tl.float32)[:, None]).to(tl.bfloat16)
        high = (high * s_high.to(tl.float32)[:, None]).to(tl.bfloat16)
    return low, high


@triton.jit
def widen_int4(packed, zero, scale, PACKED: tl.constexpr):
    """Bytes [rows, k] to (code - zero) * scale of the low and the high nibbles; zero and scale are per row."""
    if PACKED:
        zero = tl.broadcast_to((zero + 128.0).to(tl.bfloat16)[:, None], packed.shape)
        scale = tl.broadcast_to(scale.to(tl.bfloat16)[:, None], packed.shape)
        low, high = tl.inline_asm_elementwise(
            ASM_INT4, "=r,=r,=r,=r,r,r,r,r,r", [packed, zero, scale], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        low = (((packed & 15).to(tl.float32) - zero[:, None]) * scale[:, None]).to(tl.bfloat16)
        high = (((packed >> 4).to(tl.float32) - zero[:, None]) * scale[:, None]).to(tl.bfloat16)
    return low, high


@triton.jit
def load_scales(
    rows, k, inside, scale_ptr, zero_ptr,
    K: tl.constexpr, GROUP: tl.constexpr, MXFP4: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """What one block at k needs for each row: MXFP4 the exponents of its two halves, INT4 scale and zero."""
    group = rows * (K // GROUP) + k // GROUP
    mask = inside & (rows >= 0)
    first = tl.load(scale_ptr + group, mask=mask, other=0)
    if MXFP4:
        second = tl.load(scale_ptr + group + 1, mask=mask, other=0)
    elif ZERO:
        second = tl.load(zero_ptr + group, mask=mask, other=0)
    else:
        second = tl.full(rows.shape, 8, tl.uint8)
    return first, second


@triton.jit
def widen(packed, first, second, MXFP4: tl.constexpr, PACKED: tl.constexpr):
    """One block of the split layout as bf16, its first half and its second, with the scales of load_scales."""
    if MXFP4:
        low, high = widen_mx(packed, exponent_scale(first), exponent_scale(second), PACKED)
    else:
        low, high = widen_int4(packed, second.to(tl.float32), first.to(tl.float32), PACKED)
    return low, high


@triton.jit(do_not_specialize=["M"])
def gemm_w4_kernel(
    w_ptr, x_ptr, out_ptr, scale_ptr, zero_ptr, part_ptr, counter_ptr, M,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BW: tl.constexpr, BX: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr, MXFP4: tl.constexpr, ZERO: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Weights as the M side, UNROLL blocks of k a step: low nibbles are the first half of a block, high the second.
    PARTS > 1 splits k."""
    rows = tl.program_id(1) * BW + tl.arange(0, BW)
    tokens = tl.program_id(0) * BX + tl.arange(0, BX)
    part = tl.program_id(2)
    live = tokens < M
    HALF: tl.constexpr = BLOCK // 2
    half = tl.arange(0, HALF)
    acc = tl.zeros([BW, BX], tl.float32)
    w_at = w_ptr + rows[:, None].to(tl.int64) * (K // 2) + half[None, :]
    x_at = x_ptr + tokens[:, None].to(tl.int64) * K + half[None, :]
    STEP: tl.constexpr = BLOCK * UNROLL
    per = tl.cdiv(K // STEP, PARTS) * STEP
    lo = part * per
    hi = tl.minimum(lo + per, K)
    first, second = load_scales(rows, lo, lo < hi, scale_ptr, zero_ptr, K, GROUP, MXFP4, ZERO)
    for start in tl.range(lo, hi, STEP, num_stages=STAGES):
        for i in tl.static_range(UNROLL):
            k = start + i * BLOCK
            low, high = widen(tl.load(w_at + k // 2), first, second, MXFP4, PACKED)
            # one block ahead: too narrow for the pipeline of the other loads, they would be waited for every time
            first, second = load_scales(rows, k + BLOCK, k + BLOCK < hi, scale_ptr, zero_ptr, K, GROUP, MXFP4, ZERO)
            acc = tl.dot(low, tl.load(x_at + k, mask=live[:, None], other=0.0).T, acc)
            acc = tl.dot(high, tl.load(x_at + k + HALF, mask=live[:, None], other=0.0).T, acc)
    if MXFP4:
        acc = acc * UNSHIFT
    at = tokens[None, :].to(tl.int64) * N + rows[:, None]
    store_part(acc, out_ptr, part_ptr, counter_ptr, at, live[None, :], M, N, PARTS)


@triton.jit
def widen_w4_kernel(
    w_ptr, out_ptr, scale_ptr, zero_ptr,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MXFP4: tl.constexpr,
    ZERO: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The weights as bf16 [n, k]: with many tokens that costs less than widening them again in every token tile."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    HALF: tl.constexpr = BLOCK // 2
    half = tl.arange(0, HALF)
    w_at = w_ptr + rows[:, None].to(tl.int64) * (K // 2) + half[None, :]
    k = tl.program_id(1) * BLOCK
    first, second = load_scales(rows, k, k < K, scale_ptr, zero_ptr, K, GROUP, MXFP4, ZERO)
    low, high = widen(tl.load(w_at + k // 2), first, second, MXFP4, PACKED)
    if MXFP4:
        low = (low.to(tl.float32) * UNSHIFT).to(tl.bfloat16)
        high = (high.to(tl.float32) * UNSHIFT).to(tl.bfloat16)
    at = out_ptr + rows[:, None].to(tl.int64) * K + k + half[None, :]
    tl.store(at, low)
    tl.store(at + HALF, high)


@triton.jit(do_not_specialize=["M"])
def gemm_fp4_kernel(
    a_ptr, w_ptr, out_ptr, a_scale_ptr, w_scale_ptr, alpha, M,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, VEC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Both sides packed e2m1, pairs along k. VEC 16: e4m3 scales (NVFP4); 32: power-of-two exponents (MXFP4)."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    byte = tl.arange(0, BK // 2)
    group = tl.arange(0, BK // VEC)
    acc = tl.zeros([BM, BN], tl.float32)
    a_at = a_ptr + (rm % M)[:, None].to(tl.int64) * (K // 2) + byte[None, :]
    w_at = w_ptr + rn[:, None].to(tl.int64) * (K // 2) + byte[None, :]
    a_scale_at = a_scale_ptr + (rm % M)[:, None].to(tl.int64) * (K // VEC) + group[None, :]
    w_scale_at = w_scale_ptr + rn[:, None].to(tl.int64) * (K // VEC) + group[None, :]
    for k in tl.range(0, K, BK, num_stages=STAGES):
        a = tl.load(a_at + k // 2)
        w = tl.load(w_at + k // 2)
        a_scale = tl.load(a_scale_at + k // VEC)
        w_scale = tl.load(w_scale_at + k // VEC)
        acc = tl.dot_scaled(a, a_scale, "e2m1", w.T, w_scale, "e2m1", acc)
    at = out_ptr + rm[:, None].to(tl.int64) * N + rn[None, :]
    tl.store(at, (acc * alpha).to(out_ptr.dtype.element_ty), mask=(rm < M)[:, None])


def gemm_w4(
    spec: W4Spec, a: Tensor, w: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, workspace: Tensor,
    *, plans: PlanTable = EMPTY,
) -> None:  # fmt: skip
    """The workspace starts as zeros. It serves split-K and, from WIDEN_TOKENS on and where 2 n k bytes are left behind
    its counters, a bf16 copy of the weights for cuBLAS."""
    tokens = a.shape[0]
    counter, rest = workspace[:COUNTERS_NBYTES].view(torch.int32), workspace[COUNTERS_NBYTES:]
    if tokens >= WIDEN_TOKENS and rest.numel() >= 2 * spec.n * spec.k:
        wide = rest[: 2 * spec.n * spec.k].view(torch.bfloat16).view(spec.n, spec.k)
        widen_w4(spec, w, scale, zero, wide)
        torch.mm(a, wide.t(), out=out)
        return
    plan = plans.pick(tokens, w4_plan(spec, tokens))
    parts = rest.view(torch.float32)
    tiles = triton.cdiv(tokens, plan["bx"]), spec.n // plan["bw"]
    split, block = plan.get("parts", 1), block_of(spec.format)
    unroll = next(u for u in (plan.get("unroll", 1), 1) if spec.k % (u * block) == 0)
    enough = tiles[0] * tiles[1] <= counter.numel() and split * tokens * spec.n <= parts.numel()
    assert split == 1 or enough, "workspace too small"
    gemm_w4_kernel[(*tiles, split)](
        w, a, out, scale, w if zero is None else zero, parts, counter, tokens, N=spec.n, K=spec.k, GROUP=spec.group,
        BW=plan["bw"], BX=plan["bx"], BLOCK=block, PARTS=split, UNROLL=unroll, STAGES=plan["stages"],
        MXFP4=spec.format == "mxfp4", ZERO=zero is not None, PACKED=PACKED, num_warps=plan["warps"],
    )  # fmt: skip


def widen_w4(spec: W4Spec, w: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor) -> None:
    block = block_of(spec.format)
    widen_w4_kernel[(spec.n // 64, spec.k // block)](
        w, out, scale, w if zero is None else zero, K=spec.k, GROUP=spec.group, ROWS=64, BLOCK=block,
        MXFP4=spec.format == "mxfp4", ZERO=zero is not None, PACKED=PACKED, num_warps=4,
    )  # fmt: skip


def w4_plan(spec: W4Spec, tokens: int) -> Plan:
    """Parts along k until some 500 CTAs read weights, four on each multiprocessor of an H200. MXFP4 takes four of its
    small blocks a step while the tile of tokens is small."""
    bx = min(128, max(16, triton.next_power_of_2(tokens)))
    tiles = spec.n // 64 * triton.cdiv(tokens, bx)
    fit = next((p for p in (8, 4, 2) if p * tiles <= 512 and p * 512 <= spec.k), 1)
    unroll = (4 if bx == 16 else 2) if spec.format == "mxfp4" else 1
    return dict(bw=64, bx=bx, stages=3, warps=4, parts=fit if tokens <= 64 else 1, unroll=unroll)


def gemm_fp4(
    spec: FP4Spec, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor,
    *, alpha: float = 1.0, plans: PlanTable = EMPTY,
) -> None:  # fmt: skip
    tokens = a.shape[0]
    plan = plans.pick(tokens, dict(bm=128, bn=128, bk=256, stages=2, warps=8 if plans.cc == 120 else 4))
    gemm_fp4_kernel[(triton.cdiv(tokens, plan["bm"]), spec.n // plan["bn"])](
        a, w, out, a_scale, w_scale, alpha, tokens, N=spec.n, K=spec.k, BM=plan["bm"], BN=plan["bn"], BK=plan["bk"],
        VEC=16 if spec.format == "nvfp4" else 32, STAGES=plan["stages"], num_warps=plan["warps"],
    )  # fmt: skip
