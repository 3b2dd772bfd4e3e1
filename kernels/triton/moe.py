# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""Mixture of experts: routing, grouped products of sorted rows, weighted sum; no atomics, no host."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.plans import EMPTY, Plan, PlanTable
from kernels.specs import MoESpec
from kernels.triton import moe_hopper
from kernels.triton.common import PDL, pdl_launch, pdl_start, pdl_wait, to_e4m3, token_scale
from kernels.triton.moe_mx import mx_plan, mx_products
from kernels.triton.moe_shared import Weights, activate, load_bias
from kernels.triton.moe_sort import sort_by_expert
from kernels.workspace import FULL_TILE, group_width, pads_rows, sort_chunk

SORTED_ROWS: Plan = dict(bx=FULL_TILE, stages=4, warps=8, sorts_rows=True)
"""kernels.triton.moe_hopper's."""


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, weight_ptr, id_ptr,
    E: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, PAD_K: tl.constexpr, SIGMOID: tl.constexpr,
    RENORM: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    slot = tl.arange(0, PAD_K)
    pdl_start(PDL)
    if BIASED:
        bias = tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    logit = tl.load(logits_ptr + row * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    if BIASED:
        logit += bias
    top = tl.max(logit, 0)
    total = tl.sum(tl.exp(logit - top), 0)
    best = tl.full([PAD_K], float("-inf"), tl.float32)
    chosen = tl.zeros([PAD_K], tl.int32)
    for i in tl.static_range(TOP_K):
        value = tl.max(logit, 0)
        # The lower index among equals. NaN equals nothing, and what is no expert would be sorted onto others' rows.
        index = tl.min(tl.where(logit == value, e, E - 1), 0)
        best = tl.where(slot == i, value, best)
        chosen = tl.where(slot == i, index, chosen)
        logit = tl.where(e == index, float("-inf"), logit)
    if SIGMOID:
        score = tl.where(slot < TOP_K, 1.0 / (1.0 + tl.exp(-best)), 0.0)
        if RENORM and TOP_K > 1:
            score = score / tl.sum(score, 0)
    else:
        score = tl.exp(best - top)
        score = score / (tl.sum(score, 0) if RENORM else total)
    tl.store(weight_ptr + row * TOP_K + slot, score, mask=slot < TOP_K)
    tl.store(id_ptr + row * TOP_K + slot, chosen, mask=slot < TOP_K)


@triton.jit(do_not_specialize=["total"])
def expert_gemm_kernel(
    w_ptr, x_ptr, out_ptr, w_scale_ptr, x_scale_ptr, out_scale_ptr, bias_ptr, sorted_ptr, tile_ptr, total,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BW: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, FIRST: tl.constexpr, OAI: tl.constexpr, BIAS: tl.constexpr, FP8: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Weights as the M side.

    FIRST: rows of x are tokens, out is the activated middle in e4m3 with group scales; otherwise rows are assignments
    with group scales [K / BK, total], and out is bf16. Without FP8 everything is bf16 and nothing has scales.
    """
    tile = tl.program_id(1)
    rows = tl.program_id(0) * BW + tl.arange(0, BW)
    inside = rows < (N // 2 if FIRST else N)
    pdl_wait(PDL)  # before the return: whoever waits for this launch relies on those before it, too
    expert = tl.load(tile_ptr + tile)
    if expert < 0:
        return
    assigned = tl.load(sorted_ptr + tile * BX + tl.arange(0, BX))
    live = assigned < total
    source = assigned // TOP_K if FIRST else assigned
    k_off = tl.arange(0, BK)
    w_at = w_ptr + expert.to(tl.int64) * N * K + rows[:, None].to(tl.int64) * K + k_off[None, :]
    x_at = x_ptr + source[:, None].to(tl.int64) * K + k_off[None, :]
    acc = tl.zeros([BW, BX], tl.float32)
    up = tl.zeros([BW, BX], tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        x = tl.load(x_at + k, mask=live[:, None], other=0.0)
        w = tl.load(w_at + k, mask=inside[:, None], other=0.0)
        if FIRST:
            acc = tl.dot(w, x.T, acc)
            up = tl.dot(tl.load(w_at + k + (N // 2) * K, mask=inside[:, None], other=0.0), x.T, up)
        elif FP8:
            scale = tl.load(x_scale_ptr + (k // BK) * total + source, mask=live, other=0.0)
            acc += tl.dot(w, x.T) * scale[None, :]
        else:
            acc = tl.dot(w, x.T, acc)
    pdl_start(PDL)  # no earlier, see expert_mx_kernel
    if FP8:
        acc = acc * tl.load(w_scale_ptr + expert * N + rows, mask=inside, other=0.0)[:, None]
    mask = inside[:, None] & live[None, :]
    if FIRST:
        gate = acc
        if FP8:
            x_scale = tl.load(x_scale_ptr + source, mask=live, other=0.0)[None, :]
            gate = gate * x_scale
            up = up * tl.load(w_scale_ptr + expert * N + N // 2 + rows, mask=inside, other=0.0)[:, None] * x_scale
        if BIAS:
            gate += load_bias(bias_ptr + expert * N + rows, inside)
            up += load_bias(bias_ptr + expert * N + N // 2 + rows, inside)
        y = activate(gate, up, OAI)
        at = out_ptr + assigned[None, :].to(tl.int64) * (N // 2) + rows[:, None]
        if FP8:
            group = token_scale(tl.max(tl.abs(y), 0))
            tl.store(out_scale_ptr + tl.program_id(0) * total + assigned, group, mask=live)
            tl.store(at, to_e4m3(y / group[None, :]), mask=mask)
        else:
            tl.store(at, y.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        if BIAS:
            acc += load_bias(bias_ptr + expert * N + rows, inside)
        at = out_ptr + assigned[None, :].to(tl.int64) * N + rows[:, None]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["total"])
def combine_kernel(
    y_ptr, weight_ptr, out_ptr, total,
    N: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < N
    acc = tl.zeros([BLOCK], tl.float32)
    pdl_start(PDL)
    pdl_wait(PDL)
    for i in tl.static_range(TOP_K):
        y = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            at = y_ptr + (tl.cast(total, tl.int64) * part + row * TOP_K + i) * N + col
            y += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        acc += y * tl.load(weight_ptr + row * TOP_K + i)
    tl.store(out_ptr + row * N + col, acc.to(out_ptr.dtype.element_ty), mask=mask)


def moe_route(
    spec: MoESpec, logits: Tensor, weights: Tensor, ids: Tensor, *, bias: Tensor | None = None, pdl: bool = PDL
) -> None:
    route_kernel[(logits.shape[0],)](
        logits, logits if bias is None else bias, weights, ids,
        E=spec.experts, BLOCK=triton.next_power_of_2(spec.experts), TOP_K=spec.top_k,
        PAD_K=triton.next_power_of_2(spec.top_k), SIGMOID=spec.scoring == "sigmoid", RENORM=spec.renormalize,
        BIASED=bias is not None, PDL=pdl, num_warps=1, **pdl_launch(pdl),
    )  # fmt: skip


def moe_experts(
    spec: MoESpec, x: Tensor, x_scale: Tensor, weights: Tensor, ids: Tensor, w1: Tensor, w1_scale: Tensor, w2: Tensor,
    w2_scale: Tensor, out: Tensor, workspace: Tensor, *, b1: Tensor | None = None, b2: Tensor | None = None,
    plans: PlanTable = EMPTY, pdl: bool = PDL,
) -> None:  # fmt: skip
    tokens = x.shape[0]
    total = tokens * spec.top_k
    usual = expert_plan(spec, tokens, plans.cc)
    plan = plans.pick(tokens, usual)
    if plan.get("sorts_rows") and not pads_rows(spec, total):  # tuned with more tokens than these
        plan = usual
    bx = plan["bx"]
    max_tiles = min(total, spec.experts) + total // bx
    parts = plan.get("parts", 1)
    sorts_rows = plan.get("sorts_rows", False)
    room = carve(spec, workspace, total, max_tiles, bx, parts, sorts_rows)
    middle, group_scale, y, count, order, tiles = room[:6]
    sort_by_expert(spec, ids, count, order, tiles, total, max_tiles, bx, pdl)
    first, second = (w1, w1_scale, b1), (w2, w2_scale, b2)
    if spec.weights == "mxfp4":
        mx_products(spec, plan, x, first, second, middle, y, order, tiles, total, pdl)
    elif sorts_rows:
        moe_hopper.products(spec, plan, (plans.sm_count,), x, x_scale, first, second, room, pdl)
    else:
        product = fp8_products if spec.weights == "e4m3" else bf16_products
        product(spec, plan, x, x_scale, first, second, middle, group_scale, y, order, tiles, total, pdl)
    combine_kernel[(tokens, triton.cdiv(spec.hidden, 1024))](
        y, weights, out, total, N=spec.hidden, TOP_K=spec.top_k, PARTS=parts, BLOCK=1024, PDL=pdl, num_warps=4,
        **pdl_launch(pdl),
    )  # fmt: skip


def fp8_products(
    spec: MoESpec, plan: Plan, x: Tensor, x_scale: Tensor, first: Weights, second: Weights, middle: Tensor,
    group_scale: Tensor, y: Tensor, order: Tensor, tiles: Tensor, total: int, pdl: bool,
) -> None:  # fmt: skip
    group, bx, max_tiles = group_width(spec), plan["bx"], tiles.numel() - 1
    common = dict(
        TOP_K=spec.top_k, BX=bx, BK=group, STAGES=plan["stages"], BIAS=spec.bias, FP8=True, PDL=pdl,
        num_warps=plan["warps"], **pdl_launch(pdl),
    )  # fmt: skip
    (w1, s1, b1), (w2, s2, b2) = first, second
    expert_gemm_kernel[(spec.inter // group, max_tiles)](
        w1, x, middle, s1, x_scale, group_scale, s1 if b1 is None else b1, order, tiles, total,
        N=2 * spec.inter, K=spec.hidden, BW=group, FIRST=True, OAI=spec.activation != "silu", **common,
    )  # fmt: skip
    expert_gemm_kernel[(triton.cdiv(spec.hidden, plan["bw"]), max_tiles)](
        w2, middle, y, s2, group_scale, group_scale, s2 if b2 is None else b2, order, tiles, total,
        N=spec.hidden, K=spec.inter, BW=plan["bw"], FIRST=False, OAI=False, **common,
    )  # fmt: skip


def bf16_products(
    spec: MoESpec, plan: Plan, x: Tensor, x_scale: Tensor, first: Weights, second: Weights, middle: Tensor,
    group_scale: Tensor, y: Tensor, order: Tensor, tiles: Tensor, total: int, pdl: bool,
) -> None:  # fmt: skip
    bw = plan["bw"]
    common = dict(
        TOP_K=spec.top_k, BW=bw, BX=plan["bx"], BK=64, STAGES=plan["stages"], BIAS=spec.bias, FP8=False,
        PDL=pdl, num_warps=plan["warps"], **pdl_launch(pdl),
    )  # fmt: skip
    (w1, _, b1), (w2, _, b2) = first, second
    expert_gemm_kernel[(triton.cdiv(spec.inter, bw), tiles.numel() - 1)](
        w1, x, middle, group_scale, group_scale, group_scale, w1 if b1 is None else b1, order, tiles, total,
        N=2 * spec.inter, K=spec.hidden, FIRST=True, OAI=spec.activation != "silu", **common,
    )  # fmt: skip
    expert_gemm_kernel[(triton.cdiv(spec.hidden, bw), tiles.numel() - 1)](
        w2, middle, y, group_scale, group_scale, group_scale, w2 if b2 is None else b2, order, tiles, total,
        N=spec.hidden, K=spec.inter, FIRST=False, OAI=False, **common,
    )  # fmt: skip


def expert_plan(spec: MoESpec, tokens: int, cc: int) -> Plan:
    """A tile holds about as many rows as an expert gets of the next power of two tokens.

    What depends on their number changes there and nowhere else. Two accumulators of 128 x 128 spill on sm_120.
    """
    share = triton.next_power_of_2(max(1, triton.next_power_of_2(tokens) * spec.top_k // spec.experts))
    if spec.weights == "mxfp4":
        return mx_plan(share, cc)
    if spec.weights == "bf16":
        return dict(bx=min(64, max(16, share)), bw=64, stages=4, warps=4)
    if cc == 90 and share >= FULL_TILE and can_sort_rows(spec):
        return SORTED_ROWS
    bx = min(64 if cc == 120 else 128, max(16, share))
    return dict(bx=bx, bw=128 if bx >= 64 else 64, stages=4 if bx <= 32 else 3, warps=8 if bx == 128 else 4)


def can_sort_rows(spec: MoESpec) -> bool:
    """Return whether kernels.triton.moe_hopper has this layer's products.

    Three steps of 128 columns are under way there.
    """
    is_wide = group_width(spec) == 128 and spec.hidden % 256 == 0 and min(spec.hidden, spec.inter) >= 3 * 128
    return is_wide and spec.activation == "silu" and not spec.bias


def carve(
    spec: MoESpec, workspace: Tensor, total: int, max_tiles: int, bx: int, parts: int = 1, sorts_rows: bool = False
) -> list[Tensor]:
    """Return the parts of the workspace.

    The middle and its scales, the rows before the sum, counts, sorted assignments, the expert of each tile and how many
    tiles have one. `sorts_rows`: and the rows as they are sorted, and their scales; so is the middle then, sorted and
    padded.
    """
    rows = max_tiles * bx if sorts_rows else total
    shapes = [
        (torch.float8_e4m3fn if spec.weights == "e4m3" else torch.bfloat16, rows * spec.inter),
        (torch.float32, rows * (spec.inter // group_width(spec))),
        (torch.bfloat16 if parts == 1 else torch.float32, parts * total * spec.hidden),
        (torch.int32, 2 * spec.experts * triton.cdiv(total, sort_chunk(spec.experts))),
        (torch.int32, max_tiles * bx),
        (torch.int32, max_tiles + 1),
    ]
    if sorts_rows:
        shapes += [(torch.float8_e4m3fn, rows * spec.hidden), (torch.float32, rows)]
    views, start = [], 0
    for dtype, count in shapes:
        nbytes = count * dtype.itemsize
        views.append(workspace[start : start + nbytes].view(dtype))
        start += -(-nbytes // 256) * 256
    assert start <= workspace.numel(), "workspace too small"
    return views
