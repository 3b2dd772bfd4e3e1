# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""4-bit weights: INT4 (GPTQ, AWQ) with bf16 activations everywhere; both sides FP4 on Blackwell.

A product of few tokens is a read of the weights, so they lie as a step reads them (kernels.layouts.tile_int4), and come
with their scales and zeros through one pipeline of loads. 0x4300 | code is the bf16 128 + code, so that code - zero is
one subtraction and exact; the scale multiplies the float32 sum of its 128 columns. Eight weights cost eleven
instructions, and 21 with all else in the loop (64 x 16 tiles, sm_90).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.plans import EMPTY, Plan, PlanTable
from kernels.specs import W4Spec
from kernels.triton.common import INTERPRETED, PDL, ask, beside, pdl_launch, pdl_start, pdl_wait
from kernels.workspace import COUNTERS_NBYTES, WIDEN_INT4_TOKENS

# Two words to eight weights, as bf16.
ASM = tl.constexpr("""{
.reg .b32 t;
lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
shr.u32 t, $4, 4; lop3.b32 $1, t, 0x000F000F, 0x43004300, 0xEA;
shr.u32 t, $4, 8; lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA;
shr.u32 t, $4, 12; lop3.b32 $3, t, 0x000F000F, 0x43004300, 0xEA;
sub.bf16x2 $0, $0, $5; sub.bf16x2 $1, $1, $5; sub.bf16x2 $2, $2, $5; sub.bf16x2 $3, $3, $5;
}""")


@triton.jit
def widened(words, factor):
    """Widen a tile of words to bf16.

    Words [n, 32] as they are stored, and its rows' factors [n], to code - zero, bf16 [n, 128].
    """
    zero = ((factor & 15) | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    zero = tl.broadcast_to(zero[:, None], words.shape)
    words = tl.reshape(tl.permute(tl.reshape(words, (words.shape[0], 4, 4, 2)), (0, 2, 1, 3)), words.shape)
    if INTERPRETED:
        a, b, c, d = less(words, zero), less(words >> 4, zero), less(words >> 8, zero), less(words >> 12, zero)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,r,r", [words, zero], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    return beside(beside(a, b), beside(c, d))


@triton.jit
def less(words, zero):
    """The lowest code of each word less the zero, of which 128 + zero is given."""
    code = ((words & 15) | 0x4300).to(tl.bfloat16, bitcast=True)
    return (code.to(tl.float32) - zero.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def scale_of(factor):
    """Without the zero in its lowest bits."""
    return (factor & -16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["M"])
def gemm_w4_kernel(
    w_ptr, factor_ptr, x_ptr, out_ptr, M,
    N: tl.constexpr, K: tl.constexpr, BW: tl.constexpr, BX: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Weights as the M side, two tiles along k a step.

    PARTS > 1 splits k: out [PARTS, M, N] is for the reader to add up. AHEAD: steps whose weights are fetched into L2
    before the wait, since no kernel writes them.
    """
    BLOCKS: tl.constexpr = K // 128
    STEPS: tl.constexpr = (BLOCKS + 1) // 2
    PER: tl.constexpr = (STEPS + PARTS - 1) // PARTS
    row = tl.arange(0, BW)
    strip = (tl.program_id(1) * (BW // 64) + row // 64).to(tl.int64)
    tokens = tl.program_id(0) * BX + tl.arange(0, BX)
    live = tokens < M
    first = tl.program_id(2) * PER
    if PDL and AHEAD > 0:
        fetch_ahead(w_ptr, factor_ptr, first, BLOCKS, AHEAD if AHEAD < PER else PER, BW // 64)
    w_at = w_ptr + (strip * (BLOCKS * 2048) + row % 64 * 32)[:, None] + tl.arange(0, 32)[None, :]
    factor_at = factor_ptr + (strip * (STEPS * 128) + row % 64 * 2)[:, None] + tl.arange(0, 2)[None, :]
    x_at = x_ptr + tokens[:, None].to(tl.int64) * K + tl.arange(0, 128)[None, :]
    acc = tl.zeros([BW, BX], tl.float32)
    pdl_wait(PDL)
    for step in tl.range(first, tl.minimum(first + PER, STEPS), num_stages=STAGES):
        factors = tl.split(tl.load(factor_at + step * 128))  # zeros beyond the last tile
        for i in tl.static_range(2):
            block = step * 2 + i
            if BLOCKS % 2 == 0:
                words = tl.load(w_at + block * 2048)
                x = tl.load(x_at + block * 128, mask=live[:, None], other=0.0)
            else:
                within = block < BLOCKS
                words = tl.load(w_at + block * 2048, mask=within & (row >= 0)[:, None], other=0)
                x = tl.load(x_at + block * 128, mask=within & live[:, None], other=0.0)
            acc += tl.dot(widened(words, factors[i]), x.T) * scale_of(factors[i])[:, None]
    # Begun any earlier, the next launch's CTAs pile up on a few multiprocessors where these do not fill the card.
    pdl_start(PDL)
    row = tl.program_id(1) * BW + row
    at = (tl.program_id(2).to(tl.int64) * M + tokens[None, :]) * N + row[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=live[None, :])


@triton.jit
def fetch_ahead(
    w_ptr, factor_ptr, first, BLOCKS: tl.constexpr, STEPS: tl.constexpr, STRIPS: tl.constexpr,
):  # fmt: skip
    """STEPS of a CTA's strips, from the step `first` on, into L2, if there are as many."""
    if (first + STEPS) * 2 <= BLOCKS:
        for i in tl.static_range(STRIPS):
            strip = (tl.program_id(1) * STRIPS + i).to(tl.int64)
            ask(w_ptr + strip * (BLOCKS * 2048) + first * 4096, STEPS * 8192)
            ask(factor_ptr + strip * ((BLOCKS + 1) // 2 * 128) + first * 128, STEPS * 512)


@triton.jit
def widen_w4_kernel(w_ptr, factor_ptr, out_ptr, K: tl.constexpr):
    """A tile of the weights as bf16 [n, k].

    With many tokens that costs less than widening it in every token tile.
    """
    BLOCKS: tl.constexpr = K // 128
    strip, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, 64)
    words = tl.load(w_ptr + (strip * BLOCKS + block) * 2048 + (row[:, None] * 32 + tl.arange(0, 32)[None, :]))
    factor = tl.load(factor_ptr + (strip * ((BLOCKS + 1) // 2) + block // 2) * 128 + row * 2 + block % 2)
    wide = widened(words, factor).to(tl.float32) * scale_of(factor)[:, None]
    at = out_ptr + (strip * 64 + row)[:, None] * K + block * 128 + tl.arange(0, 128)[None, :]
    tl.store(at, wide.to(tl.bfloat16))


def gemm_w4(
    spec: W4Spec, a: Tensor, w: Tensor, factors: Tensor, out: Tensor, workspace: Tensor,
    *, plans: PlanTable = EMPTY, pdl: bool = PDL,
) -> None:  # fmt: skip
    """`w` and `factors` are those of kernels.layouts.tile_int4.

    The workspace serves a whole product from WIDEN_INT4_TOKENS on where, behind the counters of other products, it has
    2 n k bytes: a bf16 copy of the weights for cuBLAS.
    """
    tokens, rest = a.shape[0], workspace[COUNTERS_NBYTES:]
    if spec.parts == 1 and tokens >= WIDEN_INT4_TOKENS and rest.numel() >= 2 * spec.n * spec.k:
        wide = rest[: 2 * spec.n * spec.k].view(torch.bfloat16).view(spec.n, spec.k)
        widen_w4_kernel[(spec.n // 64, spec.k // 128)](w, factors, wide, K=spec.k, num_warps=4)
        torch.mm(a, wide.t(), out=out)
        return
    plan = plans.pick(tokens, w4_plan(spec, tokens, plans.cc, plans.sm_count))
    gemm_w4_kernel[(triton.cdiv(tokens, plan["bx"]), spec.n // plan["bw"], spec.parts)](
        w, factors, a, out, tokens, N=spec.n, K=spec.k, BW=plan["bw"], BX=plan["bx"], PARTS=spec.parts,
        STAGES=plan["stages"], AHEAD=plan["ahead"], PDL=pdl, num_warps=plan["warps"], **pdl_launch(pdl),
    )  # fmt: skip


def w4_plan(spec: W4Spec, tokens: int, cc: int = 90, sm_count: int = 132) -> Plan:
    """Return the tiles of a product.

    Tiles of 128 rows lose nearly everywhere, for there are fewer: 4096 x 4096 in two parts takes 10.2 us for 32 tokens
    by such, 7.5 by tiles of 64. What is fetched ahead is 2 % of a whole step of one token (H200).
    """
    bx = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    is_crowded = bx == 64 or spec.n // 64 * spec.parts > 2 * sm_count
    stages = 2 if bx == 64 and cc == 120 else 3 if is_crowded else 4
    return dict(bx=bx, bw=64, stages=stages, warps=4, ahead=2 if cc == 90 else 0)
