# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""FP8 GEMM in plain Triton, for every architecture.

Swap-AB tiles for few tokens, ordinary tiles for many.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.plans import EMPTY, Plan, PlanTable
from kernels.specs import GateUpSpec, GemmSpec
from kernels.triton.common import PDL, pdl_launch, pdl_start, pdl_wait, to_e4m3


@triton.jit(do_not_specialize=["M"])
def swapped_gemm_kernel(
    w_ptr, x_ptr, out_ptr, w_scale_ptr, x_scale_ptr, out_scale_ptr, M,
    N: tl.constexpr, K: tl.constexpr, BW: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr, SHARE: tl.constexpr,
    MASK: tl.constexpr, STAGES: tl.constexpr, DUAL: tl.constexpr, QUANT: tl.constexpr, GROUP: tl.constexpr,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Weights as the M side, so that 16 tokens suffice for wgmma and tcgen05.

    DUAL: silu(gate) * up, then QUANT.

    A part takes SHARE columns; MASK: some of all parts' lie past K. GROUP: x_scale is [K / BK, M], otherwise [M];
    BLOCKS: w_scale is [N / 128, K / BK] then, otherwise [N].
    """
    x_tile = tl.program_id(0)
    w_tile = tl.program_id(1)
    part = tl.program_id(2)
    rows = w_tile * BW + tl.arange(0, BW)
    tokens = x_tile * BX + tl.arange(0, BX)
    live = tokens < M
    k_off = part * SHARE + tl.arange(0, BK)
    pdl_start(PDL)
    pdl_wait(PDL)
    acc = tl.zeros([BW, BX], tl.float32)
    up = tl.zeros([BW, BX], tl.float32)
    w_at = w_ptr + rows[:, None].to(tl.int64) * K + k_off[None, :]
    x_at = x_ptr + tokens[:, None].to(tl.int64) * K + k_off[None, :]
    for k in tl.range(0, SHARE, BK, num_stages=STAGES):
        if MASK:
            inside = (k_off + k < K)[None, :]
            x = tl.load(x_at + k, mask=live[:, None] & inside, other=0.0)
            w = tl.load(w_at + k, mask=inside, other=0.0)
        else:
            x = tl.load(x_at + k, mask=live[:, None], other=0.0)
            w = tl.load(w_at + k)
        if GROUP:
            step = (part * SHARE + k) // BK
            scale = tl.load(x_scale_ptr + step * M + tokens, mask=live & (step < K // BK), other=0.0)
            partial = tl.dot(w, x.T) * scale[None, :]
            if BLOCKS:  # one by one for each row: a load of one value takes no part in the pipeline
                at = w_scale_ptr + rows // 128 * (K // BK) + step
                partial = partial * tl.load(at, mask=(rows < N) & (step < K // BK), other=0.0)[:, None]
            acc += partial
        else:
            acc = tl.dot(w, x.T, acc)
        if DUAL:
            up = tl.dot(tl.load(w_at + k + (N // 2) * K), x.T, up)
    if not BLOCKS:
        acc = acc * tl.load(w_scale_ptr + rows)[:, None]
    if not GROUP:
        x_scale = tl.load(x_scale_ptr + tokens, mask=live, other=0.0)
        acc = acc * x_scale[None, :]
    WIDTH: tl.constexpr = N // 2 if DUAL else N
    at = out_ptr + (part * M + tokens[None, :]).to(tl.int64) * WIDTH + rows[:, None]
    if DUAL:
        up = up * tl.load(w_scale_ptr + rows + N // 2)[:, None] * x_scale[None, :]
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if QUANT == 1:
        tl.store(at, to_e4m3(acc / tl.load(out_scale_ptr)), mask=live[None, :])
    elif QUANT == 2:
        group_scale = tl.maximum(tl.max(tl.abs(acc), 0), 1e-6) / 448.0
        tl.store(out_scale_ptr + w_tile * M + tokens, group_scale, mask=live)
        tl.store(at, to_e4m3(acc / group_scale[None, :]), mask=live[None, :])
    else:
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=live[None, :])


@triton.jit(do_not_specialize=["M"])
def gemm_kernel(
    a_ptr, w_ptr, out_ptr, a_scale_ptr, w_scale_ptr, M,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    RECIPE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a tile.

    RECIPE 0: one scale each; 1: per token and per row; 2: 1 x 128 scales of a as [K / 128, M], 128 x 128 of w.
    """
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(N, BN)
    tiles_m = tl.cdiv(M, BM)
    # bands of GROUP_M rows, so that the tiles in flight share operands in L2
    band = tile // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    tile_m = band * GROUP_M + tile % (GROUP_M * tiles_n) % height
    tile_n = tile % (GROUP_M * tiles_n) // height
    rm = tile_m * BM + tl.arange(0, BM)
    rn = tile_n * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    a_at = a_ptr + (rm % M)[:, None].to(tl.int64) * K + rk[None, :]
    w_at = w_ptr + (rn % N)[:, None].to(tl.int64) * K + rk[None, :]
    pdl_start(PDL)
    pdl_wait(PDL)
    acc = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        a = tl.load(a_at + k, mask=rk[None, :] < K - k, other=0.0)
        w = tl.load(w_at + k, mask=rk[None, :] < K - k, other=0.0)
        if RECIPE == 2:
            a_scale = tl.load(a_scale_ptr + k // 128 * M + rm, mask=rm < M, other=0.0)
            w_scale = tl.load(w_scale_ptr + rn // 128 * (K // 128) + k // 128, mask=rn < N, other=0.0)
            acc += tl.dot(a, w.T) * (a_scale[:, None] * w_scale[None, :])
        else:
            acc = tl.dot(a, w.T, acc)
    if RECIPE == 0:
        acc = acc * (tl.load(a_scale_ptr) * tl.load(w_scale_ptr))
    if RECIPE == 1:
        acc = (
            acc
            * tl.load(a_scale_ptr + rm, mask=rm < M, other=0.0)[:, None]
            * tl.load(w_scale_ptr + rn, mask=rn < N, other=0.0)[None, :]
        )
    at = out_ptr + rm[:, None].to(tl.int64) * N + rn[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(rm < M)[:, None] & (rn < N)[None, :])


def gemm_fp8_skinny(
    spec: GemmSpec, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor,
    *, plans: PlanTable = EMPTY, pdl: bool = PDL,
) -> None:  # fmt: skip
    tokens = a.shape[0]
    plan = fit(plans.pick(tokens, skinny_plan(tokens)), spec.share, spec.recipe != "row")
    swapped_gemm_kernel[(triton.cdiv(tokens, plan["bx"]), spec.n // plan["bw"], spec.parts)](
        w, a, out, w_scale, a_scale, a_scale, tokens, N=spec.n, K=spec.k, BW=plan["bw"], BX=plan["bx"], BK=plan["bk"],
        SHARE=spec.share, MASK=spec.parts * spec.share > spec.k, STAGES=plan["stages"], DUAL=False, QUANT=0,
        GROUP=spec.recipe != "row", BLOCKS=spec.recipe == "block128", PDL=pdl, num_warps=4, **pdl_launch(pdl),
    )  # fmt: skip


def gemm_gate_up(
    spec: GateUpSpec, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor, out_scale: Tensor,
    *, plans: PlanTable = EMPTY, pdl: bool = PDL,
) -> None:  # fmt: skip
    tokens = a.shape[0]
    plan = fit(plans.pick(tokens, skinny_plan(tokens, dual=True)), spec.k)
    bw = 128 if spec.quant == "group" else plan["bw"]
    swapped_gemm_kernel[(triton.cdiv(tokens, plan["bx"]), spec.n // 2 // bw, 1)](
        w, a, out, w_scale, a_scale, out_scale, tokens, N=spec.n, K=spec.k, BW=bw, BX=plan["bx"], BK=plan["bk"],
        SHARE=spec.k, MASK=False, STAGES=plan["stages"], DUAL=True,
        QUANT={"none": 0, "tensor": 1, "group": 2}[spec.quant], GROUP=False, BLOCKS=False, PDL=pdl, num_warps=4,
        **pdl_launch(pdl),
    )  # fmt: skip


def gemm_fp8(
    spec: GemmSpec, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor,
    *, plans: PlanTable = EMPTY, pdl: bool = PDL,
) -> None:  # fmt: skip
    tokens = a.shape[0]
    plan = plans.pick(tokens, wide_plan(tokens, spec))
    grid = (triton.cdiv(tokens, plan["bm"]) * triton.cdiv(spec.n, plan["bn"]),)
    gemm_kernel[grid](
        a, w, out, a_scale, w_scale, tokens, N=spec.n, K=spec.k, BM=plan["bm"], BN=plan["bn"], BK=128, GROUP_M=8,
        RECIPE={"tensor": 0, "row": 1, "block128": 2}[spec.recipe], STAGES=plan["stages"], PDL=pdl,
        num_warps=plan["warps"], **pdl_launch(pdl),
    )  # fmt: skip


def skinny_plan(tokens: int, dual: bool = False) -> Plan:
    bx = min(128, max(16, triton.next_power_of_2(tokens)))
    return dict(bw=64, bx=bx, bk=128, stages=3 if dual or bx > 64 else 4)


def wide_plan(tokens: int, spec: GemmSpec) -> Plan:
    """Block scales rescale the accumulator every step, which wants smaller tiles and fewer live registers."""
    bm = min(128, max(16, triton.next_power_of_2(tokens)))
    if spec.recipe == "block128":
        return dict(bm=bm, bn=128, stages=4, warps=8 if bm == 128 else 4)
    return dict(bm=bm, bn=256 if bm == 128 else 128, stages=3, warps=8 if bm == 128 else 4)


def fit(plan: Plan, share: int, group: bool = False) -> Plan:
    """Shrink the step along K until it divides the part's share.

    Scales that differ along K need steps of 128.
    """
    bk = 128 if group else plan["bk"]
    while share % bk:
        bk //= 2
    return {**plan, "bk": bk}
