# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""Products of a mixture's experts in MXFP4 with bf16 rows.

With few rows an expert's weights are read for each step, so they lie as a step reads them: tiles of 64 x 64, contiguous
(kernels.layouts.tile_mxfp4), that come through the pipeline of the loads with their scales. A load beside it, of the
scales alone, made each step wait for memory: 102 us for one token of gpt-oss-20B, which takes 45 now (H200).
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels import layouts
from kernels.plans import Plan
from kernels.specs import MoESpec
from kernels.triton.common import INTERPRETED, beside, pdl_launch, pdl_start, pdl_wait
from kernels.triton.moe_shared import Weights, activate, load_bias
from kernels.workspace import MX_PARTS, MX_SPLIT_SHARE

UNSHIFT = tl.constexpr(2.0**layouts.MX_SHIFT)
KEPT = tl.constexpr(0x81C0 - 0x10000)  # sign and code of a bf16, as an int16

# Two words to eight weights: a code's bits within a bf16 are its value times 2^-126, exactly.
ASM = tl.constexpr("""{
.reg .b32 s, t;
and.b32 $0, $4, 0x81C081C0;
shl.b32 t, $4, 3; and.b32 $1, t, 0x81C081C0;
shl.b32 t, $4, 6; and.b32 $2, t, 0x81C081C0;
shl.b32 s, $4, 1; and.b32 s, s, 0x80008000;
shr.u32 t, $4, 4; lop3.b32 s, t, 0x00C000C0, s, 0xEA;
shr.u32 t, $4, 5; lop3.b32 $3, t, 0x01000100, s, 0xEA;
mul.bf16x2 $0, $0, $5; mul.bf16x2 $1, $1, $5; mul.bf16x2 $2, $2, $6; mul.bf16x2 $3, $3, $6;
}""")


@triton.jit
def widened(words, scales):
    """A tile of words [n, 16] and its scales [n] as bf16 [n, 64] times 2^-63."""
    low = ((scales & 255) << 7).to(tl.bfloat16, bitcast=True)
    high = ((scales >> 1) & 0x7F80).to(tl.bfloat16, bitcast=True)
    low = tl.broadcast_to(low[:, None], words.shape)
    high = tl.broadcast_to(high[:, None], words.shape)
    if INTERPRETED:
        a, b, c = scaled(words & KEPT, low), scaled((words << 3) & KEPT, low), scaled((words << 6) & KEPT, high)
        d = scaled(((words << 1) & -0x8000) | ((words >> 4) & 0xC0) | ((words >> 5) & 0x100), high)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r,r", [words, low, high], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    return beside(beside(a, b), beside(c, d))


@triton.jit
def scaled(bits, scale):
    """The product of two bf16, the first by its bits."""
    return (bits.to(tl.bfloat16, bitcast=True).to(tl.float32) * scale.to(tl.float32)).to(tl.bfloat16)


@triton.jit(do_not_specialize=["total"])
def expert_mx_kernel(
    w_ptr, x_ptr, out_ptr, scale_ptr, bias_ptr, sorted_ptr, tile_ptr, total,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BW: tl.constexpr, BX: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, FIRST: tl.constexpr, OAI: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Weights as the M side, two tiles along k a step.

    FIRST: rows of x are tokens, those of the weights eight gates and eight ups in turn, and out is the activated
    middle. Otherwise rows are assignments, and PARTS > 1 splits k: out [PARTS, total, N] is for the reader to add up.
    """
    BLOCKS: tl.constexpr = K // 64
    STEPS: tl.constexpr = (BLOCKS + 1) // 2
    tile = tl.program_id(1)
    row = tl.arange(0, BW)
    strip = tl.minimum(tl.program_id(0) * (BW // 64) + row // 64, N // 64 - 1).to(tl.int64)
    pdl_wait(PDL)  # before the return: whoever waits for this launch relies on those before it, too
    expert = tl.load(tile_ptr + tile)
    if expert < 0:
        return
    strip += expert * (N // 64)
    w_at = w_ptr + (strip * (BLOCKS * 1024) + row % 64 * 16)[:, None] + tl.arange(0, 16)[None, :]
    s_at = scale_ptr + (strip * (STEPS * 128) + row % 64 * 2)[:, None] + tl.arange(0, 2)[None, :]
    assigned = tl.load(sorted_ptr + tile * BX + tl.arange(0, BX))
    live = assigned < total
    source = assigned // TOP_K if FIRST else assigned
    x_at = x_ptr + source[:, None].to(tl.int64) * K + tl.arange(0, 64)[None, :]
    acc = tl.zeros([BW, BX], tl.float32)
    PER: tl.constexpr = (STEPS + PARTS - 1) // PARTS
    first = tl.program_id(2) * PER
    for step in tl.range(first, tl.minimum(first + PER, STEPS), num_stages=STAGES):
        scales = tl.split(tl.load(s_at + step * 128))  # zeros beyond the last tile
        for i in tl.static_range(2):
            block = step * 2 + i
            within = block < BLOCKS
            words = tl.load(w_at + block * 1024, mask=within & (row >= 0)[:, None], other=0)
            x = tl.load(x_at + block * 64, mask=within & live[:, None], other=0.0)
            acc = tl.dot(widened(words, scales[i]), x.T, acc)
    # Begun any earlier, the next launch's CTAs pile up on a few multiprocessors where these do not fill the card.
    pdl_start(PDL)
    acc = acc * UNSHIFT
    if FIRST:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BW // 16, 2, 8, BX)), (0, 2, 3, 1)))
        gate, up = tl.reshape(gate, (BW // 2, BX)), tl.reshape(up, (BW // 2, BX))
        row = tl.program_id(0) * (BW // 2) + tl.arange(0, BW // 2)
        inside = row < N // 2
        if BIAS:
            gate += load_bias(bias_ptr + expert * N + row, inside)
            up += load_bias(bias_ptr + expert * N + N // 2 + row, inside)
        acc = activate(gate, up, OAI)
        at = out_ptr + assigned[None, :].to(tl.int64) * (N // 2) + row[:, None]
    else:
        row = tl.program_id(0) * BW + row
        inside = row < N
        if BIAS:
            acc += load_bias(bias_ptr + expert * N + row, inside & (tl.program_id(2) == 0))
        at = out_ptr + (tl.program_id(2).to(tl.int64) * total + assigned[None, :]) * N + row[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & live[None, :])


def mx_products(
    spec: MoESpec, plan: Plan, x: Tensor, first: Weights, second: Weights, middle: Tensor, y: Tensor, order: Tensor,
    tiles: Tensor, total: int, pdl: bool,
) -> None:  # fmt: skip
    """y `[parts, total, hidden]`, as the plan has parts."""
    (w1, s1, b1), (w2, s2, b2) = first, second
    bw, num_tiles = plan["bw"], tiles.numel() - 1
    common = dict(
        TOP_K=spec.top_k, BW=bw, BX=plan["bx"], STAGES=plan["stages"], BIAS=spec.bias,
        OAI=spec.activation != "silu", PDL=pdl, num_warps=plan["warps"], **pdl_launch(pdl),
    )  # fmt: skip
    expert_mx_kernel[(triton.cdiv(2 * spec.inter, bw), num_tiles, 1)](
        w1, x, middle, s1, x if b1 is None else b1, order, tiles, total, N=2 * spec.inter, K=spec.hidden, PARTS=1,
        FIRST=True, **common,
    )  # fmt: skip
    expert_mx_kernel[(triton.cdiv(spec.hidden, bw), num_tiles, plan["parts"])](
        w2, middle, y, s2, x if b2 is None else b2, order, tiles, total, N=spec.hidden, K=spec.inter,
        PARTS=plan["parts"], FIRST=False, **common,
    )  # fmt: skip


def mx_plan(share: int, cc: int) -> Plan:
    """share: rows that an expert gets, about.

    Few split the second product along k: it has half the first one's tiles. 128 x 128 in four warps spill on sm_120.

    gpt-oss-20B's experts at 1, 16, 256 and 4096 tokens take 45, 153, 298 and 1703 us (H200). Of some ten other plans at
    each of six counts of tokens none was faster by more than 3 %.
    """
    plan = dict(parts=MX_PARTS if share <= MX_SPLIT_SHARE else 1, stages=3)
    if share < 32:
        return dict(bx=16, bw=64, warps=4, **plan)
    is_wide = share >= 256 and cc != 120
    return dict(bx=128, bw=128, warps=4, **plan) if is_wide else dict(bx=64, bw=128, warps=8, **plan)
