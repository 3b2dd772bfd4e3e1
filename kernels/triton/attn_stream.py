# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""Paged decode attention as a stream of e4m3 pages.

One query token, at most eight heads a KV head, no window.

A CTA of one warp reads one slice of one sequence and KV head. Its first bulk copies are on their way before the
dependency wait, since keys and values of earlier tokens are constant within a step; and a multiprocessor holds so many
CTAs that one launch just fills the card, so that those of the next begin to fetch as soon as these end. A second kernel
merges the slices meanwhile, and what it has read it discards, lest it be written to memory. At 1 x 128k (gpt-oss, H200)
that is 34 us; with the states written back 35, merged by the last slice 39.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.plans import Plan
from kernels.specs import AttnSpec
from kernels.triton.attn_state import publish, share, split_pairs, store_rows
from kernels.triton.common import INTERPRETED, LN2, LOG2E, ask, pdl_launch, pdl_start, pdl_wait

ROWS = tl.constexpr(8)  # queries are columns of the product, and its narrowest width is eight
LINE = tl.constexpr(32)  # fp32 values of an L2 line of 128 bytes

DROP = tl.constexpr("""{
.reg .pred there;
setp.ne.s32 there, $2, 0;
@there discard.global.L2 [$1], 128;
mov.u32 $0, 0;
}""")


@triton.jit
def drop(ptr, there):
    """Forget lines that nobody reads again: they leave L2 without being written to memory."""
    tl.inline_asm_elementwise(DROP, "=r,l,r", [ptr, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def take(m, den, acc_even, acc_odd, k, v16, q, live):
    """One block of keys into the state.

    k [keys, D] e4m3, v16 [keys, D / 2] pairs of e4m3, q [D, ROWS] fp16, live [keys]. The state has a query a column,
    and the even and the odd values apart.

    Keys are the rows of the product: queries as its rows would fill eight of sixteen.
    """
    score = tl.where(live[:, None], tl.dot(k.to(tl.float16), q), -1.0e30)
    m_new = tl.maximum(m, tl.max(score, 0))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(score - m_new[None, :])
    den = den * alpha + tl.sum(p, 0)
    even, odd = split_pairs(tl.trans(v16))
    acc_even = tl.dot(even, p.to(tl.float16), acc_even * alpha[None, :])
    acc_odd = tl.dot(odd, p.to(tl.float16), acc_odd * alpha[None, :])
    return m_new, den, acc_even, acc_odd


@triton.jit
def load_queries(q_ptr, seq, head, qk_scale, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr):
    """The queries of one KV head as columns, times the softmax scale."""
    column = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    at = (seq * HQ + head * (HQ // HKV) + column)[None, :] * D + d[:, None]
    q = tl.load(q_ptr + at, mask=(column < HQ // HKV)[None, :], other=0.0)
    return (q.to(tl.float32) * qk_scale).to(tl.float16)


@triton.jit
def attn_stream_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, table_ptr, len_ptr, sink_ptr, out_ptr, lse_ptr, mid_ptr, ml_ptr,
    qk_scale, v_scale, stride_page, max_pages,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SLICES: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, HOLD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    slice_id = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    if HOLD != "":
        tl.inline_asm_elementwise(HOLD, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    pdl_start(PDL)
    length = tl.load(len_ptr + seq)
    lo, hi = share(slice_id, 0, length, BLOCK, SLICES)
    table = table_ptr + seq * max_pages
    # the last block goes by plain loads: it has rows beyond the end, and the new token, which the wait makes visible
    full = tl.maximum(lo, tl.minimum(hi, (length - 1) // BLOCK * BLOCK))
    page = tl.load(table + lo // PAGE, mask=lo < full, other=0)
    m = tl.full([ROWS], -1.0e30, tl.float32)
    den = tl.zeros([ROWS], tl.float32)
    acc_even = tl.zeros([D // 2, ROWS], tl.float32)
    acc_odd = tl.zeros([D // 2, ROWS], tl.float32)
    q = tl.zeros([D, ROWS], tl.float16)
    key = tl.arange(0, BLOCK)
    beyond = lo + (STAGES - 1) * BLOCK  # the first block whose copies are not on their way before the wait
    page_beyond = tl.load(table + beyond // PAGE, mask=PDL & (beyond < full), other=0).to(tl.int64)
    if PDL:
        ask(q_ptr + (seq * HQ + head * (HQ // HKV)) * D, HQ // HKV * D * 2)
    for start in tl.range(lo, full, BLOCK, num_stages=STAGES):
        at = (page * HKV + head) * PAGE + start % PAGE
        # carried over: a load in the same iteration would halve the depth of the pipeline behind it
        page = tl.load(table + (start + BLOCK) // PAGE, mask=start + BLOCK < full, other=0)
        k = k_desc.load([at, 0])
        v16 = v_desc.load([at, 0])
        if start == lo:  # in the loop, so that the pipeline's first copies come before it
            pdl_wait(PDL)
            if PDL & (beyond < full):  # asked for before the wait it would delay those that still read
                at_beyond = page_beyond * stride_page + (head * PAGE + beyond % PAGE) * D
                ask(k_ptr + at_beyond, BLOCK * D)
                ask(v_ptr + at_beyond, BLOCK * D)
            q = load_queries(q_ptr, seq, head, qk_scale, HQ, HKV, D)
        m, den, acc_even, acc_odd = take(m, den, acc_even, acc_odd, k, v16, q, key >= 0)
    pdl_wait(PDL)  # of those that had no whole block
    if full < hi:
        q = load_queries(q_ptr, seq, head, qk_scale, HQ, HKV, D)
        base = tl.load(table + full // PAGE).to(tl.int64) * stride_page + (head * PAGE + full % PAGE) * D
        live = full + key < hi
        k = tl.load(k_ptr + base + (key * D)[:, None] + tl.arange(0, D)[None, :])  # rows beyond the end are there
        at16 = base // 2 + (key * (D // 2))[:, None] + tl.arange(0, D // 2)[None, :]
        v16 = tl.load(v_ptr.to(tl.pointer_type(tl.int16)) + at16, mask=live[:, None], other=0)
        m, den, acc_even, acc_odd = take(m, den, acc_even, acc_odd, k, v16, q, live)
    acc = tl.reshape(tl.join(tl.trans(acc_even), tl.trans(acc_odd)), (ROWS, D))
    row = tl.arange(0, ROWS)
    if SLICES > 1:
        state = ((seq * HKV + head) * SLICES + slice_id).to(tl.int64)
        publish(mid_ptr, ml_ptr, state, m, den, acc, row, row < HQ // HKV, ROWS, D)
    else:
        store_rows(m, den, acc, sink_ptr, out_ptr, lse_ptr, v_scale, seq, head, row, HQ, HQ // HKV, D, 1, SINKS, LSE)


@triton.jit
def attn_merge_kernel(
    mid_ptr, ml_ptr, sink_ptr, out_ptr, lse_ptr, v_scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, SLICES: tl.constexpr,
    WIDTH: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PART columns of one query head: the states of its SLICES slices as one, normalized.

    WIDTH: SLICES or more. LINES: each part of a state is so many whole lines of L2, to be discarded; 0: keep them.

    One warp and next to no shared memory, so that it fits beside the CTAs that stream.
    """
    G: tl.constexpr = HQ // HKV
    row = tl.program_id(0) // (D // PART)
    part = tl.program_id(0) % (D // PART)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    pdl_start(PDL)
    q_head = head * G + row
    sink = -1.0e30
    if SINKS:  # weights, so before the wait
        sink = tl.load(sink_ptr + q_head).to(tl.float32) * LOG2E
    pdl_wait(PDL)
    j = tl.arange(0, WIDTH)
    d = part * PART + tl.arange(0, PART)
    state = ((seq * HKV + head) * SLICES + j).to(tl.int64)
    # .cg: other multiprocessors wrote these, and this one's L1 may hold what was there before
    m = tl.load(ml_ptr + state * 2 * ROWS + row, mask=j < SLICES, other=-1.0e30, cache_modifier=".cg")
    den = tl.load(ml_ptr + state * 2 * ROWS + ROWS + row, mask=j < SLICES, other=0.0, cache_modifier=".cg")
    at = (state * ROWS + row)[:, None] * D + d[None, :]
    acc = tl.load(mid_ptr + at, mask=(j < SLICES)[:, None], other=0.0, cache_modifier=".cg")
    top = tl.max(m, 0)
    weight = tl.exp2(m - top)
    total, sums = tl.sum(den * weight, 0), tl.sum(acc * weight[:, None], 0)
    if SINKS:
        m_all = tl.maximum(top, sink)
        sums = sums * tl.exp2(top - m_all)
        total = total * tl.exp2(top - m_all) + tl.exp2(sink - m_all)
        top = m_all
    y = sums / tl.where(total > 0, total, 1.0)  # of no keys zeros, as `finish` leaves them
    tl.store(out_ptr + (seq * HQ + q_head) * D + d, (y * v_scale).to(out_ptr.dtype.element_ty))
    if LSE:
        tl.store(lse_ptr + seq * HQ + q_head, (top + tl.log2(total)) * LN2, mask=part == 0)
    if LINES > 0:
        tl.debug_barrier()  # other lanes read what this one drops
        line = (state * ROWS + row)[:, None] * D + part * PART + tl.arange(0, LINES)[None, :] * LINE
        drop(mid_ptr + line, tl.broadcast_to((j < SLICES)[:, None], (WIDTH, LINES)))


def streams(spec: AttnSpec) -> bool:
    return spec.kv == "e4m3" and spec.q_len == 1 and not spec.window and spec.q_heads <= ROWS.value * spec.kv_heads


def stream_plan(pairs: int, max_len: int, spec: AttnSpec) -> Plan:
    """Eight CTAs on each of 132 multiprocessors where the context allows.

    Two slices of a context cost more than one.

    Two buffers of 32 keys: with more in flight memory gets slower, by 3 % at 24 KiB a CTA (16 x 16k, H200).
    """
    slices = min(8 * 132 // pairs, 132, triton.cdiv(max_len, spec.page))
    slices = slices if slices > 2 else 1
    residents = min(8, triton.cdiv(pairs * slices, 132))
    return dict(stream=True, slices=slices, block=min(32, spec.page), stages=3, warps=1, residents=residents)


def hold(plan: Plan, head_dim: int) -> str:
    """An instruction that takes shared memory nobody reads, so that no more than the plan's CTAs fit.

    With room for more, those of the next launch pile up on the multiprocessors that are done first: 44 us, not 36, at
    16 x 8k (gpt-oss, H200). Larger buffers would do it too, and are slower. 45 KiB: a launch may have 48 unasked.
    """
    buffers = (plan["stages"] - 1) * plan["block"] * 2 * head_dim
    kib = (min(45 << 10, (192 << 10) // plan.get("residents", 8)) - buffers) >> 10
    store = "mov.u32 $0, 0; st.shared.u32 [held], $0;"
    return f"{{.shared .align 1024 .b8 held[{kib << 10}]; {store}}}" if kib > 0 else ""


def stream(
    spec: AttnSpec, plan: Plan, q: Tensor, k_cache: Tensor, v_cache: Tensor, boxes: tuple[Any, Any],
    block_table: Tensor, seq_lens: Tensor, out: Tensor, sinks: Tensor, lse: Tensor, mid: Tensor, ml: Tensor,
    qk_scale: float, v_scale: float, pdl: bool,
) -> None:  # fmt: skip
    """attn_decode by such a plan.

    boxes: both caches as `attn_decode.boxes` gives them; mid, ml: for the states.
    """
    batch, slices, heads, dim = seq_lens.shape[0], plan["slices"], spec.kv_heads, spec.head_dim
    shape = dict(HQ=spec.q_heads, HKV=heads, D=dim, SLICES=slices, SINKS=spec.sinks, LSE=spec.lse, PDL=pdl)
    attn_stream_kernel[(slices, heads, batch)](
        q, k_cache, v_cache, *boxes, block_table, seq_lens, sinks, out, lse, mid, ml, qk_scale * LOG2E.value, v_scale,
        k_cache.stride(0), block_table.stride(0), PAGE=spec.page, BLOCK=plan["block"], STAGES=plan["stages"],
        HOLD=hold(plan, dim) if pdl else "", num_warps=1, **shape, **pdl_launch(pdl),
    )  # fmt: skip
    if slices > 1:
        width = triton.next_power_of_2(slices)
        part = merge_part(slices, dim)
        whole = part % LINE.value == 0 and mid.data_ptr() % 128 == 0 and not INTERPRETED.value
        attn_merge_kernel[(spec.q_heads // heads * dim // part, heads, batch)](
            mid, ml, sinks, out, lse, v_scale, PART=part, WIDTH=width, LINES=part // LINE.value if whole else 0,
            num_warps=1, **shape, **pdl_launch(pdl),
        )  # fmt: skip


def merge_part(slices: int, head_dim: int) -> int:
    """Return how many columns a CTA merges.

    4096 values or fewer, so that a warp's registers hold them, but whole lines of L2.
    """
    return min(head_dim, max(LINE.value, 4096 // triton.next_power_of_2(slices)))
