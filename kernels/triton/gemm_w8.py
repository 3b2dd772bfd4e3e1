# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""e4m3 weights with bf16 activations: a weight widens exactly, and its scale goes to the float32 sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.plans import EMPTY, Plan, PlanTable
from kernels.specs import W8Spec
from kernels.triton.common import store_part
from kernels.workspace import COUNTERS_NBYTES, WIDEN_TOKENS

# Columns that a step of k takes, and rows that share their scale; 0: a row has one scale.
STEPS = {"row": (128, 0), "group32": (32, 1), "block128": (128, 128)}


@triton.jit
def load_scales(scale_ptr, rows, inside, k, K: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr):
    """Those of a tile's rows at k, where they differ along k; else ones, which nobody reads."""
    if SPAN == 0:
        return tl.full(rows.shape, 1.0, tl.float32)
    at = rows // SPAN * tl.cdiv(K, STEP) + k // STEP
    return tl.load(scale_ptr + at, mask=inside & (k < K), other=0.0)


@triton.jit(do_not_specialize=["M"])
def gemm_w8_kernel(
    w_ptr, x_ptr, out_ptr, scale_ptr, part_ptr, counter_ptr, M,
    N: tl.constexpr, K: tl.constexpr, BW: tl.constexpr, BX: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    STEP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Weights as the M side, STEP of k at a time, so that a row has one scale in a step."""
    rows = tl.program_id(1) * BW + tl.arange(0, BW)
    tokens = tl.program_id(0) * BX + tl.arange(0, BX)
    columns = tl.arange(0, STEP)
    inside, live = rows < N, tokens < M
    acc = tl.zeros([BW, BX], tl.float32)
    w_at = w_ptr + rows[:, None].to(tl.int64) * K + columns[None, :]
    x_at = x_ptr + tokens[:, None].to(tl.int64) * K + columns[None, :]
    per = tl.cdiv(tl.cdiv(K, 128), PARTS) * 128
    lo = tl.program_id(2) * per
    scale = load_scales(scale_ptr, rows, inside, lo, K, STEP, SPAN)
    for k in tl.range(lo, tl.minimum(lo + per, K), STEP, num_stages=STAGES):
        x = tl.load(x_at + k, mask=live[:, None] & (columns[None, :] < K - k), other=0.0)
        if N % BW == 0 and K % STEP == 0:
            w = tl.load(w_at + k)
        else:
            w = tl.load(w_at + k, mask=inside[:, None] & (columns[None, :] < K - k), other=0.0)
        if SPAN == 0:
            acc = tl.dot(w.to(tl.bfloat16), x.T, acc)
        else:
            acc += tl.dot(w.to(tl.bfloat16), x.T) * scale[:, None]
            # one step ahead: too narrow for the pipeline of the other loads, it would be waited for every time
            scale = load_scales(scale_ptr, rows, inside, k + STEP, K, STEP, SPAN)
    if SPAN == 0:
        acc = acc * tl.load(scale_ptr + rows, mask=inside, other=0.0)[:, None]
    at = tokens[None, :].to(tl.int64) * N + rows[:, None]
    store_part(acc, out_ptr, part_ptr, counter_ptr, at, inside[:, None] & live[None, :], M, N, PARTS)


@triton.jit
def widen_w8_kernel(
    w_ptr, out_ptr, scale_ptr, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """The weights as bf16 [n, k], scaled.

    With many tokens that costs less than widening them in every token tile.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * STEP
    columns = k + tl.arange(0, STEP)
    inside = rows < N
    mask = inside[:, None] & (columns < K)[None, :]
    at = rows[:, None].to(tl.int64) * K + columns[None, :]
    if SPAN == 0:
        scale = tl.load(scale_ptr + rows, mask=inside, other=0.0)
    else:
        scale = load_scales(scale_ptr, rows, inside, k, K, STEP, SPAN)
    wide = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale[:, None]
    tl.store(out_ptr + at, wide.to(tl.bfloat16), mask=mask)


def gemm_w8(
    spec: W8Spec, a: Tensor, w: Tensor, scale: Tensor, out: Tensor, workspace: Tensor, *, plans: PlanTable = EMPTY
) -> None:
    """The workspace starts as zeros.

    It serves split-K and, from WIDEN_TOKENS on and where 2 n k bytes are left behind its counters, a bf16 copy of the
    weights for cuBLAS.
    """
    tokens = a.shape[0]
    counter, rest = workspace[:COUNTERS_NBYTES].view(torch.int32), workspace[COUNTERS_NBYTES:]
    step, span = STEPS[spec.recipe]
    if tokens >= WIDEN_TOKENS and rest.numel() >= 2 * spec.n * spec.k:
        wide = rest[: 2 * spec.n * spec.k].view(torch.bfloat16).view(spec.n, spec.k)
        widen_w8_kernel[(triton.cdiv(spec.n, 32), triton.cdiv(spec.k, step))](
            w, wide, scale, N=spec.n, K=spec.k, ROWS=32, STEP=step, SPAN=span, num_warps=4
        )
        torch.mm(a, wide.t(), out=out)
        return
    plan = plans.pick(tokens, w8_plan(spec, tokens))
    parts, split = rest.view(torch.float32), plan["parts"]
    tiles = triton.cdiv(tokens, plan["bx"]), triton.cdiv(spec.n, plan["bw"])
    enough = tiles[0] * tiles[1] <= counter.numel() and split * tokens * spec.n <= parts.numel()
    assert split == 1 or enough, "workspace too small"
    gemm_w8_kernel[(*tiles, split)](
        w, a, out, scale, parts, counter, tokens, N=spec.n, K=spec.k, BW=plan["bw"], BX=plan["bx"], PARTS=split,
        STAGES=plan["stages"], STEP=step, SPAN=span, num_warps=plan["warps"],
    )  # fmt: skip


def w8_plan(spec: W8Spec, tokens: int) -> Plan:
    """Parts along k until some 500 CTAs read weights, four on each multiprocessor of an H200.

    8 warps hold a wide tile's two accumulators.
    """
    bx = min(128, max(16, triton.next_power_of_2(tokens)))
    tiles = triton.cdiv(spec.n, 64) * triton.cdiv(tokens, bx)
    fit = next((p for p in (8, 4, 2) if p * tiles <= 512 and p * 512 <= spec.k), 1)
    stages, parts = 6 if spec.recipe == "group32" else 3, fit if tokens <= 64 else 1
    return dict(bw=64, bx=bx, stages=stages, warps=8 if bx == 128 else 4, parts=parts)
