# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""Paged prefill attention.

Chunks of several sequences against their cached prefix, the new tokens already appended.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.plans import EMPTY, Plan, PlanTable
from kernels.specs import AttnSpec, MLASpec
from kernels.triton.attn_decode import attend
from kernels.triton.attn_state import finish, fresh
from kernels.triton.common import LOG2E
from kernels.triton.prefill_parts import Parts, merge_parts, publish_rows, share_keys, state_nbytes
from kernels.triton.relaunch import BatchLaunches


@triton.jit(do_not_specialize=["max_pages", "parts", "span", "num_rows"])
def attn_prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, len_ptr, start_ptr, sink_ptr, out_ptr, lse_ptr, state_ptr, qk_scale, v_scale,
    stride_page, max_pages, parts, span, num_rows,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, PACK: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Attend for one tile of queries.

    The rows of a tile are PACK neighbouring heads of each of BM / PACK queries, so that those share the keys.
    """
    QUERIES: tl.constexpr = BM // PACK
    seq = tl.program_id(2) // parts
    part = tl.program_id(2) % parts
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the tiles with the most keys first
    first = tl.load(start_ptr + seq)
    count = tl.load(start_ptr + seq + 1) - first
    if tile * QUERIES >= count:
        return
    length = tl.load(len_ptr + seq)
    query = tile * QUERIES + tl.arange(0, BM) // PACK
    head = tl.program_id(1) * PACK + tl.arange(0, BM) % PACK
    live = query < count
    limit = length - count + query
    lo = part * (span // BLOCK) * BLOCK  # the compiler sees a block's beginning
    hi = tl.minimum(tl.minimum(length - count + (tile + 1) * QUERIES, length), lo + span)
    if lo >= hi:
        return
    if WINDOW > 0:
        lo = tl.maximum(length - count + tile * QUERIES + 1 - WINDOW, 0) // BLOCK * BLOCK
    d = tl.arange(0, D)
    row = (first + query) * HQ + head
    at = row.to(tl.int64)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=live[:, None], other=0.0).to(tl.float32) * qk_scale
    q = q.to(tl.float16) if HALF else q.to(tl.bfloat16)
    table = table_ptr + seq * max_pages
    kv_head = tl.program_id(1) * PACK // (HQ // HKV)
    m, den, acc = fresh(BM, D)
    edge = lo
    if WINDOW == 0:  # keys that every row sees need no mask
        edge = tl.maximum(tl.minimum((length - count + tile * QUERIES + 1) // BLOCK * BLOCK, hi), lo)
        m, den, acc = attend(
            m, den, acc, q, k_ptr, v_ptr, table, lo, edge, limit, stride_page, kv_head, D, PAGE, BLOCK, STAGES, 0, 0
        )
    m, den, acc = attend(
        m, den, acc, q, k_ptr, v_ptr, table, edge, hi, limit, stride_page, kv_head, D, PAGE, BLOCK, STAGES, 2, WINDOW
    )
    if parts > 1:
        states = num_rows.to(tl.int64) * HQ
        publish_rows(state_ptr, parts * states, part * states + row, m, den, acc, live, D)
    else:
        y, lse = finish(m, den, acc, sink_ptr, head, live, SINKS)
        tl.store(out_ptr + at, (y * v_scale).to(out_ptr.dtype.element_ty), mask=live[:, None])
        if LSE:
            tl.store(lse_ptr + row, lse, mask=live)


@triton.jit(do_not_specialize=["max_pages"])
def widen_kernel(
    k_ptr, v_ptr, table_ptr, len_ptr, k_out_ptr, v_out_ptr, stride_page, max_pages, max_rows,
    HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Widen the keys and values of sequences.

    e4m3 pages to contiguous fp16 [sequence, head, max_rows, D]: exact, and once instead of in every tile.
    """
    page = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    if page * PAGE >= tl.load(len_ptr + seq):
        return
    n = tl.arange(0, PAGE)[:, None] * D + tl.arange(0, D)[None, :]
    src = tl.load(table_ptr + seq * max_pages + page).to(tl.int64) * stride_page + head * PAGE * D
    dst = ((seq * HKV + head).to(tl.int64) * max_rows + page * PAGE) * D
    tl.store(k_out_ptr + dst + n, tl.load(k_ptr + src + n).to(tl.float16))
    tl.store(v_out_ptr + dst + n, tl.load(v_ptr + src + n).to(tl.float16))


@triton.jit
def attend_rows(
    m, den, acc, q, k_desc, v_desc, base, lo, hi, limit, BLOCK: tl.constexpr, STAGES: tl.constexpr, MASK: tl.constexpr
):
    """Online softmax over contiguous rows lo..hi from `base` on.

    MASK: hide what lies beyond each row's limit.
    """
    for start in tl.range(lo, hi, BLOCK, num_stages=STAGES):
        k = k_desc.load([base + start, 0])
        v = v_desc.load([base + start, 0])
        score = tl.dot(q, tl.trans(k))
        if MASK:
            n = start + tl.arange(0, BLOCK)
            score = tl.where(n[None, :] <= limit[:, None], score, -1.0e30)
            v = tl.where((n < hi)[:, None], v, 0.0)  # rows past the end hold anything, and 0 x NaN is NaN
        m_new = tl.maximum(m, tl.max(score, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(score - m_new[:, None])
        den = den * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None])
        m = m_new
    return m, den, acc


@triton.jit
def attn_rows_kernel(
    q_ptr, k_desc, v_desc, len_ptr, start_ptr, sink_ptr, out_ptr, lse_ptr, qk_scale, v_scale, max_rows,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Prefill over the widened rows.

    Heads of a group and neighbouring tiles run together and share keys in L2.
    """
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the tiles with the most keys first
    seq = tl.program_id(2)
    first = tl.load(start_ptr + seq)
    count = tl.load(start_ptr + seq + 1) - first
    if tile * BM >= count:
        return
    length = tl.load(len_ptr + seq)
    row = tile * BM + tl.arange(0, BM)
    live = row < count
    limit = length - count + row
    edge = (length - count + tile * BM + 1) // BLOCK * BLOCK
    hi = tl.minimum(length - count + (tile + 1) * BM, length)
    d = tl.arange(0, D)
    at = ((first + row) * HQ + head).to(tl.int64)[:, None] * D + d[None, :]
    q = (tl.load(q_ptr + at, mask=live[:, None], other=0.0).to(tl.float32) * qk_scale).to(tl.float16)
    base = (seq * HKV + head // (HQ // HKV)) * max_rows
    m, den, acc = fresh(BM, D)
    m, den, acc = attend_rows(m, den, acc, q, k_desc, v_desc, base, 0, edge, limit, BLOCK, STAGES, False)
    m, den, acc = attend_rows(m, den, acc, q, k_desc, v_desc, base, edge, hi, limit, BLOCK, STAGES, True)
    y, lse = finish(m, den, acc, sink_ptr, row * 0 + head, live, SINKS)
    tl.store(out_ptr + at, (y * v_scale).to(out_ptr.dtype.element_ty), mask=live[:, None])
    if LSE:
        tl.store(lse_ptr + (first + row) * HQ + head, lse, mask=live)


@triton.jit(do_not_specialize=["parts", "span", "num_rows"])
def attn_rows_parts_kernel(
    q_ptr, k_desc, v_desc, len_ptr, start_ptr, sink_ptr, out_ptr, lse_ptr, state_ptr, qk_scale, v_scale, max_rows,
    parts, span, num_rows,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """The same where there may be several parts.

    As one kernel the two took 3.5 % longer for 8192 tokens (H200).
    """
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    seq = tl.program_id(2) // parts
    part = tl.program_id(2) % parts
    first = tl.load(start_ptr + seq)
    count = tl.load(start_ptr + seq + 1) - first
    if tile * BM >= count:
        return
    length = tl.load(len_ptr + seq)
    query = tile * BM + tl.arange(0, BM)
    limit = length - count + query
    d = tl.arange(0, D)
    top = (first + tile * BM).to(tl.int64) * HQ + head
    row = tl.arange(0, BM) * HQ
    at = row[:, None] * D + d[None, :]
    q = tl.load(q_ptr + top * D + at, mask=(query < count)[:, None], other=0.0)
    q = (q.to(tl.float32) * qk_scale).to(tl.float16)
    lo = part * (span // BLOCK) * BLOCK  # the compiler sees a block's beginning
    hi = tl.minimum(tl.minimum(length - count + (tile + 1) * BM, length), lo + span)
    edge = tl.maximum(tl.minimum((length - count + tile * BM + 1) // BLOCK * BLOCK, hi), lo)
    if lo >= hi:
        return
    base = (seq * HKV + head // (HQ // HKV)) * max_rows
    m, den, acc = fresh(BM, D)
    m, den, acc = attend_rows(m, den, acc, q, k_desc, v_desc, base, lo, edge, limit, BLOCK, STAGES, False)
    m, den, acc = attend_rows(m, den, acc, q, k_desc, v_desc, base, edge, hi, limit, BLOCK, STAGES, True)
    live = tl.arange(0, BM) < count - tile * BM  # query < count: kept from above, it would spill registers
    if parts > 1:
        states = num_rows.to(tl.int64) * HQ
        publish_rows(state_ptr, parts * states, part * states + top + row, m, den, acc, live, D)
    else:
        y, lse = finish(m, den, acc, sink_ptr, row * 0 + head, live, SINKS)
        tl.store(out_ptr + top * D + at, (y * v_scale).to(out_ptr.dtype.element_ty), mask=live[:, None])
        if LSE:
            tl.store(lse_ptr + top + row, lse, mask=live)


@triton.jit(do_not_specialize=["max_pages"])
def mla_kernel(
    q_ptr, c_ptr, table_ptr, len_ptr, start_ptr, out_ptr, qk_scale, scale, max_pages,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One query token and ROWS heads; the latent is key and value at once."""
    query = tl.program_id(1)
    seq = tl.program_id(2)
    first = tl.load(start_ptr + seq)
    count = tl.load(start_ptr + seq + 1) - first
    if query >= count:
        return
    W: tl.constexpr = LATENT + ROPE
    hi = tl.load(len_ptr + seq) - count + query + 1
    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = head < HEADS
    c = tl.arange(0, LATENT)
    r = tl.arange(0, ROPE)
    at = ((first + query) * HEADS + head).to(tl.int64)[:, None]
    q = (tl.load(q_ptr + at * W + c[None, :], mask=live[:, None], other=0.0).to(tl.float32) * qk_scale).to(tl.bfloat16)
    q_rope = (
        tl.load(q_ptr + at * W + LATENT + r[None, :], mask=live[:, None], other=0.0).to(tl.float32) * qk_scale
    ).to(tl.bfloat16)
    m, den, acc = fresh(ROWS, LATENT)
    for start in tl.range(0, hi, BLOCK, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK)
        seen = n < hi
        page = tl.load(table_ptr + seq * max_pages + n // PAGE, mask=seen, other=0).to(tl.int64)
        off = (page * PAGE + n % PAGE) * W
        latent = tl.load(c_ptr + off[:, None] + c[None, :], mask=seen[:, None], other=0.0).to(tl.bfloat16)
        rope = tl.load(c_ptr + off[:, None] + LATENT + r[None, :], mask=seen[:, None], other=0.0).to(tl.bfloat16)
        score = tl.dot(q, tl.trans(latent)) + tl.dot(q_rope, tl.trans(rope))
        score = tl.where(seen[None, :], score, -1.0e30)
        m_new = tl.maximum(m, tl.max(score, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(score - m_new[:, None])
        den = den * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.bfloat16), latent, acc * alpha[:, None])
        m = m_new
    y = acc / tl.where(den > 0, den, 1.0)[:, None] * scale
    tl.store(out_ptr + at * LATENT + c[None, :], y.to(out_ptr.dtype.element_ty), mask=live[:, None])


def attn_prefill(
    spec: AttnSpec, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    q_starts: Tensor,
    kv_starts: Tensor, out: Tensor, workspace: Tensor, *, max_q: int, max_kv: int, sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0, sinks: Tensor | None = None, lse: Tensor | None = None, prepared: BatchLaunches | None = None,
    plans: PlanTable = EMPTY,
) -> None:  # fmt: skip
    """`prepared`: of the batch, so that its layers launch alike."""
    sinks, lse = q if sinks is None else sinks, seq_lens if lse is None else lse
    launches = (BatchLaunches() if prepared is None else prepared).of(
        q.data_ptr(), q.shape, out.data_ptr(), block_table.data_ptr(), block_table.stride(0), seq_lens.data_ptr(),
        seq_lens.shape, q_starts.data_ptr(), lse.data_ptr(), workspace.data_ptr(), workspace.shape, max_q, max_kv,
        k_cache.stride(0), k_cache.data_ptr() % 16, v_cache.data_ptr() % 16, sinks.data_ptr() % 16,
    )  # fmt: skip
    plan = launches.once("plan", lambda: chosen_plan(spec, max_q, plans))
    args = (q, k_cache, v_cache, block_table, seq_lens, q_starts, sinks, out, lse, max_q, max_kv)
    scales = (sm_scale * k_scale * LOG2E.value, v_scale)
    step = max(128, spec.page)  # whole tiles, of whole pages
    rows = triton.cdiv(max_kv, step) * step
    nbytes = 4 * seq_lens.shape[0] * spec.kv_heads * rows * spec.head_dim
    tiles = triton.cdiv(max_q, plan["bm"]) * spec.q_heads * seq_lens.shape[0]
    # Tiles that leave half of the card idle gain less by widened keys than by shared ones.
    needed = nbytes + (2 * state_nbytes(spec, q.shape[0]) if 2 * tiles <= plans.sm_count else 0)
    if not (plan.get("widen", True) and spec.kv == "e4m3" and not spec.window and max_q > 64):
        parts = prefill_paged(launches, spec, plan, *args, *scales, plans.sm_count, workspace)
    elif needed <= workspace.numel():
        copies = workspace[:nbytes].view(torch.float16)
        parts = prefill_widened(launches, spec, plan, *args, *scales, plans.sm_count, workspace[nbytes:], copies, rows)
    else:  # in tiles that shorter chunks take too, so that lack of room compiles nothing
        short = prefill_plan(spec, 64, plans.cc)
        parts = prefill_paged(launches, spec, short, *args, *scales, plans.sm_count, workspace)
    if parts.count > 1:
        merge_parts(launches, spec, parts, seq_lens, q_starts, sinks, out, lse, max_q, v_scale)


def chosen_plan(spec: AttnSpec, max_q: int, plans: PlanTable) -> Plan:
    """Return the tiles for chunks of at most `max_q` rows: tables are tuned for those that fill a tile."""
    rule = prefill_plan(spec, max_q, plans.cc)
    return plans.pick(max_q, rule) if max_q >= 128 else rule


def prefill_paged(
    launches: BatchLaunches, spec: AttnSpec, plan: Plan, q: Tensor, k_cache: Tensor, v_cache: Tensor,
    block_table: Tensor, seq_lens: Tensor,
    q_starts: Tensor, sinks: Tensor, out: Tensor, lse: Tensor, max_q: int, max_kv: int, qk_scale: float,
    v_scale: float, sms: int, scratch: Tensor,
) -> Parts:  # fmt: skip
    batch, bm, pack, block = seq_lens.shape[0], plan["bm"], plan.get("pack", 1), min(plan["block"], spec.page)
    parts = launches.once(
        "parts", lambda: share_keys(spec, q.shape[0], max_q, max_kv, batch, bm, pack, block, sms, scratch)
    )
    args = (
        q, k_cache, v_cache, block_table, seq_lens, q_starts, sinks, out, lse, parts.states, qk_scale, v_scale,
        k_cache.stride(0), block_table.stride(0), parts.count, parts.span, q.shape[0],
    )  # fmt: skip
    launches.launch(
        attn_prefill_kernel, (triton.cdiv(max_q, bm // pack), spec.q_heads // pack, batch * parts.count), args,
        HQ=spec.q_heads, HKV=spec.kv_heads, D=spec.head_dim, PAGE=spec.page, BM=bm, PACK=pack, BLOCK=block,
        STAGES=plan["stages"], WINDOW=spec.window, SINKS=spec.sinks, LSE=spec.lse, HALF=spec.kv == "e4m3",
        num_warps=plan["warps"],
    )  # fmt: skip
    return parts


def prefill_widened(
    launches: BatchLaunches, spec: AttnSpec, plan: Plan, q: Tensor, k_cache: Tensor, v_cache: Tensor,
    block_table: Tensor, seq_lens: Tensor,
    q_starts: Tensor, sinks: Tensor, out: Tensor, lse: Tensor, max_q: int, max_kv: int, qk_scale: float,
    v_scale: float, sms: int, scratch: Tensor, copies: Tensor, rows: int,
) -> Parts:  # fmt: skip
    """`copies`: for fp16 keys and values of `rows` rows a sequence.

    Pays where several query tiles read the same.
    """
    batch, dim, heads, bm, block = seq_lens.shape[0], spec.head_dim, spec.kv_heads, plan["bm"], plan["block"]
    half = batch * heads * rows
    k, v = launches.once("copies", lambda: copies.view(2, half, dim).unbind())
    launches.launch(
        widen_kernel, (rows // spec.page, heads, batch),
        (k_cache, v_cache, block_table, seq_lens, k, v, k_cache.stride(0), block_table.stride(0), rows),
        HKV=heads, D=dim, PAGE=spec.page, num_warps=4,
    )  # fmt: skip
    boxes = launches.once("boxes", lambda: [TensorDescriptor(t, [half, dim], [dim, 1], [block, dim]) for t in (k, v)])
    args = (q, *boxes, seq_lens, q_starts, sinks, out, lse)
    meta = dict(
        HQ=spec.q_heads, HKV=heads, D=dim, BM=bm, BLOCK=block, STAGES=plan["stages"], SINKS=spec.sinks, LSE=spec.lse,
        num_warps=plan["warps"],
    )  # fmt: skip
    grid = (spec.q_heads, triton.cdiv(max_q, bm))
    if triton.next_power_of_2(max_q) * spec.q_heads > 2 * sms * bm:  # by class of chunks: each fills the card twice
        launches.launch(attn_rows_kernel, (*grid, batch), (*args, qk_scale, v_scale, rows), **meta)
        return Parts(1, rows, scratch)
    parts = launches.once(
        "parts", lambda: share_keys(spec, q.shape[0], max_q, max_kv, batch, bm, 1, block, sms, scratch)
    )
    launches.launch(
        attn_rows_parts_kernel, (*grid, batch * parts.count),
        (*args, parts.states, qk_scale, v_scale, rows, parts.count, parts.span, q.shape[0]), **meta,
    )  # fmt: skip
    return parts


def prefill_plan(spec: AttnSpec, max_q: int, cc: int) -> Plan:
    """Return the tiles of prefill attention.

    On sm_120 the accumulator lives in plain mma registers: 128 rows spill, and shared memory is half as large.

    pack: query heads to a tile, all of a KV head's, where its queries don't fill one, or a window makes large tiles
    read keys that most of their rows don't see. Packed tiles of 8192 bf16 rows took 5 % longer (H200).
    """
    group = spec.q_heads // spec.kv_heads
    pack = group if group in (1, 2, 4, 8, 16, 32, 64) and (max_q < 128 or spec.window) else 1
    needed = max(16, triton.next_power_of_2(max_q) * pack)
    if cc == 120 or spec.window:
        stages, warps = 3, 8 if cc == 120 else 4
        return dict(bm=min(64, needed), pack=pack, block=min(64, spec.page), stages=stages, warps=warps, widen=False)
    bm = min(128, needed)
    return dict(bm=bm, pack=pack, block=128, stages=3, warps=8 if bm == 128 else 4)


def mla_attention(
    spec: MLASpec, q: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, q_starts: Tensor, out: Tensor,
    *, max_q: int, sm_scale: float, scale: float = 1.0, plans: PlanTable = EMPTY,
) -> None:  # fmt: skip
    plan = plans.pick(max_q, dict(rows=16, block=32, stages=2, warps=4))
    rows = plan["rows"]
    mla_kernel[(triton.cdiv(spec.heads, rows), max_q, seq_lens.shape[0])](
        q, cache, block_table, seq_lens, q_starts, out, sm_scale * scale * LOG2E.value, scale, block_table.stride(0),
        HEADS=spec.heads, LATENT=spec.latent, ROPE=spec.rope, PAGE=spec.page, ROWS=rows, BLOCK=plan["block"],
        STAGES=plan["stages"], num_warps=plan["warps"],
    )  # fmt: skip
