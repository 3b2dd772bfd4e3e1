# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""Paged decode attention, split along the sequence.

The last slice to finish merges through scratch in global memory.

Two entry points share the loop: `attn_decode` takes q and any of window, sinks, several query tokens, LSE out, and
hands the common case to `attn_stream`; `attn_decode_fused` takes the qkv product and does rope, append, attention and
quantization in one launch.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.plans import EMPTY, Plan, PlanTable
from kernels.specs import AttnSpec, FusedAttnSpec
from kernels.triton.attn_state import fresh, merge_states, publish, share, split_pairs, store_rows, turn
from kernels.triton.attn_stream import stream, stream_plan, streams
from kernels.triton.common import LOG2E, PDL, pdl_launch, pdl_start, pdl_wait, to_e4m3, token_scale
from kernels.workspace import COUNTERS_NBYTES


@triton.jit
def weigh(acc_even, acc_odd, p, v16, alpha):
    """acc * alpha + p @ v with the columns of v apart."""
    even, odd = split_pairs(v16)
    acc_even = tl.dot(p.to(tl.float16), even, acc_even * alpha[:, None])
    acc_odd = tl.dot(p.to(tl.float16), odd, acc_odd * alpha[:, None])
    return acc_even, acc_odd


@triton.jit
def together(acc_even, acc_odd, ROWS: tl.constexpr, D: tl.constexpr):
    return tl.reshape(tl.join(acc_even, acc_odd), (ROWS, D))


@triton.jit
def apart(acc, ROWS: tl.constexpr, D: tl.constexpr):
    return tl.split(tl.reshape(acc, (ROWS, D // 2, 2)))


@triton.jit
def attend_e4m3(
    m, den, acc, q, k_ptr, v_ptr, table_ptr, lo, hi, limit, stride_page, head,
    ROWS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    MASK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """`attend` for a few rows and an e4m3 cache, values by pairs; MASK is 1 or 2."""
    d = tl.arange(0, D)
    pair = tl.arange(0, D // 2)
    v16_ptr = v_ptr.to(tl.pointer_type(tl.int16))
    acc_even, acc_odd = apart(acc, ROWS, D)
    row = tl.arange(0, BLOCK)
    for start in tl.range(lo, hi, BLOCK, num_stages=STAGES):
        n = start + row
        live = n < hi
        if BLOCK == PAGE:
            base = tl.load(table_ptr + start // PAGE).to(tl.int64) * stride_page + head * PAGE * D
            k_at = k_ptr + base + (row * D)[:, None] + d[None, :]
            v_at = v16_ptr + base // 2 + (row * (D // 2))[:, None] + pair[None, :]
            k = tl.load(k_at)  # rows past the end are there, and their scores are hidden below
        else:
            page = tl.load(table_ptr + n // PAGE, mask=live, other=0).to(tl.int64)
            off = page * stride_page + head * PAGE * D + (n % PAGE) * D
            k_at = k_ptr + off[:, None] + d[None, :]
            v_at = v16_ptr + (off // 2)[:, None] + pair[None, :]
            k = tl.load(k_at, mask=live[:, None], other=0.0)
        v16 = tl.load(v_at, mask=live[:, None], other=0)
        score = tl.dot(q, tl.trans(k).to(q.dtype))
        seen = live[None, :]
        if MASK == 2:
            seen = seen & (n[None, :] <= limit[:, None])
            if WINDOW > 0:
                seen = seen & (n[None, :] > limit[:, None] - WINDOW)
        score = tl.where(seen, score, -1.0e30)
        m_new = tl.maximum(m, tl.max(score, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(score - m_new[:, None])
        den = den * alpha + tl.sum(p, 1)
        acc_even, acc_odd = weigh(acc_even, acc_odd, p, v16, alpha)
        m = m_new
    return m, den, together(acc_even, acc_odd, ROWS, D)


@triton.jit
def attend(
    m, den, acc, q, k_ptr, v_ptr, table_ptr, lo, hi, limit, stride_page, head,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys lo..hi of one KV head.

    Rows of q are (query, head) pairs; q carries the softmax scale times log2(e). limit: the last key each row may see.
    MASK: 0 none, hi - lo is whole blocks and all are seen; 1 only the end at hi; 2 also limit and WINDOW; 3 also limit,
    which is the first key that each row may see.
    """
    d = tl.arange(0, D)
    for start in tl.range(lo, hi, BLOCK, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK)
        live = n < hi
        if BLOCK == PAGE:
            off = (
                tl.load(table_ptr + start // PAGE).to(tl.int64) * stride_page
                + head * PAGE * D
                + tl.arange(0, BLOCK) * D
            )
        else:
            page = tl.load(table_ptr + n // PAGE, mask=live, other=0).to(tl.int64)
            off = page * stride_page + head * PAGE * D + (n % PAGE) * D
        if MASK == 0:
            k = tl.load(k_ptr + off[:, None] + d[None, :])
            v = tl.load(v_ptr + off[:, None] + d[None, :])
        else:
            k = tl.load(k_ptr + off[:, None] + d[None, :], mask=live[:, None], other=0.0)
            v = tl.load(v_ptr + off[:, None] + d[None, :], mask=live[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k).to(q.dtype))
        if MASK > 0:
            seen = live[None, :]
            if MASK == 2:
                seen = seen & (n[None, :] <= limit[:, None])
                if WINDOW > 0:
                    seen = seen & (n[None, :] > limit[:, None] - WINDOW)
            if MASK == 3:
                seen = seen & (n[None, :] >= limit[:, None])
            score = tl.where(seen, score, -1.0e30)
        m_new = tl.maximum(m, tl.max(score, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(score - m_new[:, None])
        den = den * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None])
        m = m_new
    return m, den, acc


@triton.jit
def attend_pages(
    m, den, acc, q, k_desc, v16_desc, table_ptr, page, lo, hi, head,
    HKV: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend over whole pages lo..hi of a cache seen as rows.

    BLOCK keys of a head are one box of the bulk copy engine, so that a single warp keeps several in flight. page: the
    table's entry for lo, which the caller reads early.
    """
    acc_even, acc_odd = apart(acc, ROWS, D)
    for start in tl.range(lo, hi, BLOCK, num_stages=STAGES):
        at = (page * HKV + head) * PAGE + start % PAGE
        # carried over: a load in the same iteration would halve the depth of the pipeline behind it
        page = tl.load(table_ptr + (start + BLOCK) // PAGE, mask=start + BLOCK < hi, other=0)
        k = k_desc.load([at, 0])
        v16 = v16_desc.load([at, 0])
        score = tl.dot(q, tl.trans(k).to(q.dtype))
        m_new = tl.maximum(m, tl.max(score, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(score - m_new[:, None])
        den = den * alpha + tl.sum(p, 1)
        acc_even, acc_odd = weigh(acc_even, acc_odd, p, v16, alpha)
        m = m_new
    return m, den, together(acc_even, acc_odd, ROWS, D)


@triton.jit
def merge_slices(
    mid_ptr, ml_ptr, counter_ptr, m, den, acc, slice_id, slices, row, live,
    ROWS: tl.constexpr, LIVE: tl.constexpr, PAD: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Publish this slice's state.

    The last slice to arrive returns (true, the merged state, PAD rows high).

    Beyond GROUP slices in two levels: the last of each group merges its own, and puts the result where its first was;
    the last of all groups merges these. One CTA that merged 64 slices alone took 6 of 76 us at 1 x 128k (H200).
    Counters, of the groups and behind them of all, are zero again afterwards: the next launch needs no zeroing kernel.
    """
    groups = tl.cdiv(slices, GROUP)
    group = slice_id // GROUP
    first = group * GROUP
    count = tl.minimum(slices - first, GROUP)
    publish(mid_ptr, ml_ptr, slice_id, m, den, acc, row, live, ROWS, D)
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr + group, 1, sem="acq_rel") == count - 1
    m_all = tl.full([PAD], -1.0e30, tl.float32)
    den_all = tl.zeros([PAD], tl.float32)
    acc_all = tl.zeros([PAD, D], tl.float32)
    if last:
        m_all, den_all, acc_all = merge_states(mid_ptr, ml_ptr, first, count, ROWS, LIVE, PAD, D, GROUP, CHUNK, 1)
        tl.store(counter_ptr + group, 0)
        if groups > 1:
            r = tl.arange(0, PAD)
            tl.debug_barrier()  # all of this CTA have read the first
            publish(mid_ptr, ml_ptr, first, m_all, den_all, acc_all, r, r < LIVE, ROWS, D)
            tl.debug_barrier()
            last = tl.atomic_add(counter_ptr + groups, 1, sem="acq_rel") == groups - 1
            if last:
                m_all, den_all, acc_all = merge_states(
                    mid_ptr, ml_ptr, 0, groups, ROWS, LIVE, PAD, D, GROUP, CHUNK, GROUP
                )
                tl.store(counter_ptr + groups, 0)
    return last, m_all, den_all, acc_all


@triton.jit
def attn_decode_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, table_ptr, len_ptr, start_ptr, sink_ptr, out_ptr, lse_ptr, mid_ptr, ml_ptr,
    counter_ptr, qk_scale, v_scale, stride_page, max_pages,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, Q_LEN: tl.constexpr, ROWS: tl.constexpr,
    SLICES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, BULK: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    slice_id = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    G: tl.constexpr = HQ // HKV
    pdl_start(PDL and EARLY)
    length = tl.load(len_ptr + seq)
    row = tl.arange(0, ROWS)
    live = row < Q_LEN * G
    query = seq * Q_LEN + row // G
    q_head = head * G + row % G
    limit = length - Q_LEN + row // G
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - Q_LEN + 1 - WINDOW, 0) // BLOCK * BLOCK
    if STARTS:
        start = tl.load(start_ptr + seq)
        first = start // BLOCK * BLOCK
        limit = start + tl.zeros([ROWS], tl.int32)
    lo, hi = share(slice_id, first, length, BLOCK, SLICES)
    d = tl.arange(0, D)
    table = table_ptr + seq * max_pages
    # a block with rows beyond the end goes by plain loads
    full = tl.maximum(lo, tl.minimum(hi, length // BLOCK * BLOCK))
    page = tl.load(table + lo // PAGE, mask=BULK & (lo < full), other=0)  # tables are constant within a step
    pdl_wait(PDL)
    q = (
        tl.load(q_ptr + (query * HQ + q_head)[:, None] * D + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        * qk_scale
    )
    # e4m3 converts to fp16 in one instruction and to bf16 in several
    q = q.to(tl.float16) if HALF else q.to(tl.bfloat16)
    MASK: tl.constexpr = 3 if STARTS else 2 if Q_LEN > 1 or WINDOW > 0 else 1
    m, den, acc = fresh(ROWS, D)
    if BULK:
        m, den, acc = attend_pages(
            m, den, acc, q, k_desc, v_desc, table, page, lo, full, head, HKV, ROWS, D, PAGE, BLOCK, STAGES
        )
        m, den, acc = attend_e4m3(
            m, den, acc, q, k_ptr, v_ptr, table, full, hi, limit, stride_page, head, ROWS, D, PAGE, BLOCK, 1, 1, 0
        )
    elif HALF and PAIRS:
        m, den, acc = attend_e4m3(
            m, den, acc, q, k_ptr, v_ptr, table, lo, hi, limit, stride_page, head, ROWS, D, PAGE, BLOCK, STAGES, MASK,
            WINDOW,
        )  # fmt: skip
    else:
        m, den, acc = attend(
            m, den, acc, q, k_ptr, v_ptr, table, lo, hi, limit, stride_page, head, D, PAGE, BLOCK, STAGES, MASK, WINDOW
        )
    pdl_start(PDL and not EARLY)
    if SLICES > 1:
        pair = (seq * HKV + head).to(tl.int64)
        GROUPS: tl.constexpr = (SLICES + GROUP - 1) // GROUP
        last, m_all, den_all, acc_all = merge_slices(
            mid_ptr + pair * SLICES * ROWS * D, ml_ptr + pair * SLICES * 2 * ROWS, counter_ptr + pair * (GROUPS + 1),
            m, den, acc, slice_id, SLICES, row, live, ROWS, Q_LEN * G, PAD, D, GROUP, CHUNK,
        )  # fmt: skip
        if last:
            store_rows(
                m_all, den_all, acc_all, sink_ptr, out_ptr, lse_ptr, v_scale, seq, head, tl.arange(0, PAD), HQ, G, D,
                Q_LEN, SINKS, LSE,
            )  # fmt: skip
    else:
        store_rows(m, den, acc, sink_ptr, out_ptr, lse_ptr, v_scale, seq, head, row, HQ, G, D, Q_LEN, SINKS, LSE)


@triton.jit
def load_parts(ptr, offset, mask, num_tokens, stride, PARTS: tl.constexpr):
    """Sum of the split-K parts of the qkv product at `offset` within a token's row block."""
    total = tl.load(ptr + offset, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ptr + part * num_tokens * stride + offset, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def append_token(
    qkv_ptr, token, pos, cos, sin, factor, k_ptr, v_ptr, table, channel_scale_ptr, bias_ptr, k_gain_ptr, eps, k_inv,
    v_scale, stride_page, num_tokens, head,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    DEFERRED: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Write K and V of one head of a token, a row of the qkv product, to its place `pos` of a sequence.

    Whoever does it for the same token writes the same bits.
    """
    W: tl.constexpr = (HQ + 2 * HKV) * D
    H: tl.constexpr = D // 2
    d = tl.arange(0, D)
    h = tl.arange(0, H)
    at = (HQ + head) * D
    k1 = load_parts(qkv_ptr, token * W + at + h, h >= 0, num_tokens, W, PARTS)
    k2 = load_parts(qkv_ptr, token * W + at + H + h, h >= 0, num_tokens, W, PARTS)
    v_new = load_parts(qkv_ptr, token * W + at + HKV * D + d, d >= 0, num_tokens, W, PARTS)
    if DEFERRED:
        k1 = k1 * factor * tl.load(channel_scale_ptr + at + h)
        k2 = k2 * factor * tl.load(channel_scale_ptr + at + H + h)
        v_new = v_new * factor * tl.load(channel_scale_ptr + at + HKV * D + d)
    if BIASED:
        k1 += tl.load(bias_ptr + at + h).to(tl.float32)
        k2 += tl.load(bias_ptr + at + H + h).to(tl.float32)
        v_new += tl.load(bias_ptr + at + HKV * D + d).to(tl.float32)
    if NORMED:
        r = tl.rsqrt(tl.sum(k1 * k1 + k2 * k2, 0) / D + eps)
        k1 *= r * tl.load(k_gain_ptr + h).to(tl.float32)
        k2 *= r * tl.load(k_gain_ptr + H + h).to(tl.float32)
    page = tl.load(table + pos // PAGE).to(tl.int64)
    slot = page * stride_page + (head * PAGE + pos % PAGE) * D
    tl.store(k_ptr + slot + h, to_e4m3((k1 * cos - k2 * sin) * k_inv))
    tl.store(k_ptr + slot + H + h, to_e4m3((k2 * cos + k1 * sin) * k_inv))
    tl.store(v_ptr + slot + d, to_e4m3(v_new / v_scale))


@triton.jit(do_not_specialize=["num_tokens"])
def attn_fused_kernel(
    qkv_ptr, k_ptr, v_ptr, k_desc, v_desc, table_ptr, len_ptr, behind_ptr, cos_sin_ptr, out_ptr, out_scale_ptr, mid_ptr,
    ml_ptr, counter_ptr,
    token_scale_ptr, channel_scale_ptr, bias_ptr, q_gain_ptr, k_gain_ptr, eps, qk_scale, k_inv, v_scale, stride_page,
    max_pages, num_tokens,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr, SLICES: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, QUANT: tl.constexpr, DEFERRED: tl.constexpr, BIASED: tl.constexpr,
    NORMED: tl.constexpr, PAD: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, BULK: tl.constexpr,
    PAIRS: tl.constexpr, PDL: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr, SEQS: tl.constexpr,
    DRAFTED: tl.constexpr,
):  # fmt: skip
    """MOST 0: each sequence has SLICES; else all have them together, see `turn`.

    DRAFTED: each row attends as a sequence of its own, but so many rows before it as `behind` says have the tokens
    before its own, in the same pages. Nobody waits for them: the CTA that reads their keys writes them first, as others
    do that read them, all of them the same bits.


    CTAs without any come last then: among the others they would leave some multiprocessors a CTA more than others,
    which cost a third of 16 x 8k.
    """
    if MOST == 0:
        slice_id, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        slices = SLICES
        first_place = (seq * HKV + head) * SLICES
    else:
        head = tl.program_id(0)
        seq, slice_id, slices, first_place = turn(tl.program_id(1), len_ptr, num_tokens, SLICES, MOST, LEAST, SEQS)
        if seq >= num_tokens:
            return
        first_place += head * tl.num_programs(1)
    GROUPS: tl.constexpr = ((MOST if MOST > 0 else SLICES) + GROUP - 1) // GROUP
    G: tl.constexpr = HQ // HKV
    ROWS: tl.constexpr = 16
    W: tl.constexpr = (HQ + 2 * HKV) * D
    H: tl.constexpr = D // 2
    pdl_start(PDL)
    length = tl.load(len_ptr + seq)  # lengths, tables and old pages are constant within a step: read before the wait
    pos = length - 1
    lo, hi = share(slice_id, 0, length, BLOCK, slices)
    h = tl.arange(0, H)
    row = tl.arange(0, ROWS)
    live = row < G
    q_head = head * G + row
    cos = tl.load(cos_sin_ptr + pos * D + h)
    sin = tl.load(cos_sin_ptr + pos * D + H + h)
    table = table_ptr + seq * max_pages
    first_new = pos
    if DRAFTED:  # the rows before this one have new tokens of the same sequence, which they may not have written yet
        first_new = pos - tl.load(behind_ptr + seq)
    # the last blocks go by plain loads: they have rows beyond the end, and new tokens, not yet visible to a bulk copy
    full = tl.maximum(lo, tl.minimum(hi, first_new // BLOCK * BLOCK))
    first_page = tl.load(table + lo // PAGE, mask=BULK & (lo < full), other=0)
    pdl_wait(PDL)
    factor = 1.0
    if DEFERRED:
        factor = tl.load(token_scale_ptr + seq)
    if DRAFTED:
        for new in tl.range(tl.maximum(lo, first_new), hi, num_stages=1):  # those that this slice owns
            token = seq - (pos - new)
            append_token(
                qkv_ptr, token, new, tl.load(cos_sin_ptr + new * D + h), tl.load(cos_sin_ptr + new * D + H + h),
                tl.load(token_scale_ptr + token) if DEFERRED else 1.0, k_ptr, v_ptr, table, channel_scale_ptr, bias_ptr,
                k_gain_ptr, eps, k_inv, v_scale, stride_page, num_tokens, head, HQ, HKV, D, PAGE, PARTS, DEFERRED,
                BIASED, NORMED,
            )  # fmt: skip
    elif (lo < length) & (hi == length):  # this slice owns the new token
        append_token(
            qkv_ptr, seq, pos, cos, sin, factor, k_ptr, v_ptr, table, channel_scale_ptr, bias_ptr, k_gain_ptr, eps,
            k_inv, v_scale, stride_page, num_tokens, head, HQ, HKV, D, PAGE, PARTS, DEFERRED, BIASED, NORMED,
        )  # fmt: skip
    tl.debug_barrier()
    q_off = q_head[:, None] * D + h[None, :]
    q1 = load_parts(qkv_ptr, seq * W + q_off, live[:, None], num_tokens, W, PARTS)
    q2 = load_parts(qkv_ptr, seq * W + q_off + H, live[:, None], num_tokens, W, PARTS)
    if DEFERRED:
        q1 = q1 * factor * tl.load(channel_scale_ptr + q_off, mask=live[:, None], other=0.0)
        q2 = q2 * factor * tl.load(channel_scale_ptr + q_off + H, mask=live[:, None], other=0.0)
    if BIASED:
        q1 += tl.load(bias_ptr + q_off, mask=live[:, None], other=0.0).to(tl.float32)
        q2 += tl.load(bias_ptr + q_off + H, mask=live[:, None], other=0.0).to(tl.float32)
    if NORMED:
        r = tl.rsqrt(tl.sum(q1 * q1 + q2 * q2, 1) / D + eps)[:, None]
        q1 *= r * tl.load(q_gain_ptr + h).to(tl.float32)[None, :]
        q2 *= r * tl.load(q_gain_ptr + H + h).to(tl.float32)[None, :]
    r1 = (q1 * cos[None, :] - q2 * sin[None, :]) * qk_scale
    r2 = (q2 * cos[None, :] + q1 * sin[None, :]) * qk_scale
    q = tl.reshape(tl.permute(tl.join(r1, r2), (0, 2, 1)), (ROWS, D)).to(tl.float16)
    m, den, acc = fresh(ROWS, D)
    if BULK:
        m, den, acc = attend_pages(
            m, den, acc, q, k_desc, v_desc, table, first_page, lo, full, head, HKV, ROWS, D, PAGE, BLOCK, STAGES
        )
        m, den, acc = attend_e4m3(
            m, den, acc, q, k_ptr, v_ptr, table, full, hi, row, stride_page, head, ROWS, D, PAGE, BLOCK, 1, 1, 0
        )
    elif PAIRS:
        m, den, acc = attend_e4m3(
            m, den, acc, q, k_ptr, v_ptr, table, lo, hi, row, stride_page, head, ROWS, D, PAGE, BLOCK, STAGES, 1, 0
        )
    else:
        m, den, acc = attend(
            m, den, acc, q, k_ptr, v_ptr, table, lo, hi, row, stride_page, head, D, PAGE, BLOCK, STAGES, 1, 0
        )
    if SLICES > 1:
        at = first_place.to(tl.int64)
        last, _, den_all, acc_all = merge_slices(
            mid_ptr + at * ROWS * D, ml_ptr + at * 2 * ROWS, counter_ptr + (seq * HKV + head) * (GROUPS + 1),
            m, den, acc, slice_id, slices, row, live, ROWS, G, PAD, D, GROUP, CHUNK,
        )  # fmt: skip
        if last:
            store_quantized(
                den_all, acc_all, out_ptr, out_scale_ptr, v_scale, seq, head, num_tokens, HQ, G, D, PAD, QUANT
            )
    else:
        store_quantized(den, acc, out_ptr, out_scale_ptr, v_scale, seq, head, num_tokens, HQ, G, D, ROWS, QUANT)


@triton.jit
def store_quantized(
    den, acc, out_ptr, out_scale_ptr, v_scale, seq, head, num_tokens,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEIGHT: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Normalize, round and write G heads of one token.

    QUANT 0: bf16; 2: by the given scale; 3: a scale per head.
    """
    row = tl.arange(0, HEIGHT)
    d = tl.arange(0, D)
    live = row < G
    q_head = head * G + row
    y = acc / tl.where(live & (den > 0), den, 1.0)[:, None] * v_scale
    if QUANT == 2:
        y = y / tl.load(out_scale_ptr)
    if QUANT == 3:
        group_scale = token_scale(tl.max(tl.abs(y), 1))
        tl.store(out_scale_ptr + q_head * num_tokens + seq, group_scale, mask=live)
        y = y / group_scale[:, None]
    y8 = to_e4m3(y) if QUANT > 0 else y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (seq * HQ + q_head)[:, None] * D + d[None, :], y8, mask=live[:, None])


def attn_decode(
    spec: AttnSpec, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor,
    workspace: Tensor, *, sm_scale: float, k_scale: float = 1.0, v_scale: float = 1.0, sinks: Tensor | None = None,
    lse: Tensor | None = None, starts: Tensor | None = None, max_len: int = 0, plans: PlanTable = EMPTY,
    pdl: bool = PDL,
) -> None:  # fmt: skip
    batch, longest = seq_lens.shape[0], max_len or block_table.shape[1] * spec.page
    if starts is None:
        plan = choose(plans, batch, longest, spec)
    else:
        assert spec.kv == "bf16" and spec.q_len == 1 and not spec.window, "starts are those of a draft head's rows"
        plan = slice_plan(batch * spec.kv_heads, longest, spec)
    slices, pairs = plan["slices"], batch * spec.kv_heads
    if plan.get("stream") and streams(spec) and k_cache.is_contiguous():
        mid, ml, _ = split_workspace(workspace, pairs * slices, 0, 8, spec.head_dim)
        return stream(
            spec, plan, q, k_cache, v_cache, boxes(k_cache, v_cache, plan["block"], True), block_table, seq_lens, out,
            q if sinks is None else sinks, mid if lse is None else lse, mid, ml, sm_scale * k_scale, v_scale, pdl,
        )  # fmt: skip
    rows = query_rows(spec)
    bulk = bool(plan.get("bulk")) and spec.q_len == 1 and not spec.window and k_cache.is_contiguous()
    merge = merge_plan(slices, spec.q_len * spec.q_heads // spec.kv_heads, spec.head_dim, plan["warps"])
    mid, ml, counter = split_workspace(
        workspace, pairs * slices, pairs * num_counted(slices, merge), rows, spec.head_dim
    )
    attn_decode_kernel[(slices, spec.kv_heads, batch)](
        q, k_cache, v_cache, *boxes(k_cache, v_cache, plan["block"], bulk), block_table, seq_lens,
        seq_lens if starts is None else starts, q if sinks is None else sinks,
        out, mid if lse is None else lse,
        mid, ml, counter, sm_scale * k_scale * LOG2E.value, v_scale, k_cache.stride(0), block_table.stride(0),
        HQ=spec.q_heads, HKV=spec.kv_heads, D=spec.head_dim, PAGE=spec.page, Q_LEN=spec.q_len, ROWS=rows, SLICES=slices,
        BLOCK=plan["block"], STAGES=plan["stages"], WINDOW=spec.window, STARTS=starts is not None,
        SINKS=spec.sinks, LSE=spec.lse, HALF=spec.kv == "e4m3", BULK=bulk, PAIRS=by_pairs(plan), PDL=pdl,
        EARLY=plan.get("early", True),
        num_warps=plan["warps"], **merge, **pdl_launch(pdl),
    )  # fmt: skip


def attn_decode_fused(
    spec: FusedAttnSpec, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    cos_sin: Tensor, out: Tensor, out_scale: Tensor, workspace: Tensor,
    *, sm_scale: float, k_scale: float = 1.0, v_scale: float = 1.0, token_scale: Tensor | None = None,
    channel_scale: Tensor | None = None, bias: Tensor | None = None, q_gain: Tensor | None = None,
    k_gain: Tensor | None = None, eps: float = 0.0, behind: Tensor | None = None, max_len: int = 0,
    plans: PlanTable = EMPTY, pdl: bool = PDL,
) -> None:  # fmt: skip
    batch = seq_lens.shape[0]
    plan = choose(plans, batch, max_len or block_table.shape[1] * spec.page, spec)
    slices, bulk, most = plan["slices"], bool(plan.get("bulk")), plan.get("most", 0)
    grid = (spec.kv_heads, slices, 1) if most else (slices, spec.kv_heads, batch)
    merge = merge_plan(most or slices, spec.q_heads // spec.kv_heads, spec.head_dim, plan["warps"])
    num_counters = batch * spec.kv_heads * num_counted(most or slices, merge)
    mid, ml, counter = split_workspace(workspace, math.prod(grid), num_counters, 16, spec.head_dim)
    attn_fused_kernel[grid](
        qkv, k_cache, v_cache, *boxes(k_cache, v_cache, plan["block"], bulk), block_table, seq_lens,
        seq_lens if behind is None else behind, cos_sin, out, out_scale, mid, ml, counter,
        out_scale if token_scale is None else token_scale, out_scale if channel_scale is None else channel_scale,
        cos_sin if bias is None else bias, cos_sin if q_gain is None else q_gain, cos_sin if k_gain is None else k_gain,
        eps, sm_scale * k_scale * LOG2E.value, 1.0 / k_scale, v_scale, k_cache.stride(0), block_table.stride(0), batch,
        HQ=spec.q_heads, HKV=spec.kv_heads, D=spec.head_dim, PAGE=spec.page, PARTS=spec.parts, SLICES=slices,
        BLOCK=plan["block"], STAGES=plan["stages"], QUANT={"none": 0, "tensor": 2, "group": 3}[spec.quant],
        DEFERRED=spec.deferred, BIASED=spec.biased, NORMED=spec.normed, BULK=bulk, PAIRS=by_pairs(plan), PDL=pdl,
        MOST=most, LEAST=plan.get("least", 1), SEQS=max(16, triton.next_power_of_2(batch)), DRAFTED=behind is not None,
        num_warps=plan["warps"], **merge, **pdl_launch(pdl),
    )  # fmt: skip


def choose(plans: PlanTable, batch: int, max_len: int, spec: AttnSpec | FusedAttnSpec) -> Plan:
    """Tables are tuned near a context of 1k, where fixed costs matter.

    Beyond it the rule for long contexts holds.
    """
    rule = slice_plan(batch * spec.kv_heads, max_len, spec)
    return plans.pick(batch, rule) if max_len <= 2048 else rule


def by_pairs(plan: Plan) -> bool:
    """Values by pairs halve the columns of a product; with several warps too little is left for each."""
    return plan.get("pairs", plan["warps"] == 1)


def boxes(k_cache: Tensor, v_cache: Tensor, block: int, bulk: bool) -> tuple[Any, Any]:
    """The caches as rows of head_dim for the bulk copy engine: a box is `block` keys of one head.

    Values go by pairs of e4m3, see split_pairs.
    """
    if not bulk:
        return k_cache, v_cache
    return key_boxes(k_cache, block), key_boxes(v_cache.view(torch.int16), block)


def key_boxes(cache: Tensor, block: int) -> Any:
    dim = cache.shape[-1]
    return TensorDescriptor(cache, [cache.numel() // dim, dim], [dim, 1], [block, dim])  # type: ignore[arg-type]


def query_rows(spec: AttnSpec) -> int:
    """Rows of the query tile: query tokens times heads of a group, padded to what the matrix unit takes."""
    return max(16, triton.next_power_of_2(spec.q_len * spec.q_heads // spec.kv_heads))


def slice_plan(pairs: int, max_len: int, spec: AttnSpec | FusedAttnSpec) -> Plan:
    """Return how many slices a sequence and KV head is cut into, and how each is read.

    Tuned on H200.

    `pairs`: of a sequence and a KV head.
    """
    if isinstance(spec, FusedAttnSpec):
        return shared_plan(pairs, max_len, spec) or e4m3_plan(pairs, max_len, spec)
    if streams(spec):
        return stream_plan(pairs, max_len, spec)
    is_narrow, is_e4m3 = query_rows(spec) == 16, spec.kv == "e4m3"
    if is_narrow and is_e4m3 and not spec.window:
        return e4m3_plan(pairs, max_len, spec)
    blocks = count_blocks(min(max_len, spec.window + spec.page) if spec.window else max_len, spec.page)
    common = dict(block=min(64, spec.page))
    if is_narrow and spec.kv == "bf16" and not spec.window:
        return dict(common, slices=max(1, min(4 * 132 // pairs, blocks, 64)), stages=3, warps=2)
    slices = max(1, min(396 // pairs, blocks, 64))
    if is_narrow and is_e4m3:
        return dict(common, slices=slices, stages=4, warps=4 if pairs < 64 else 1 if slices == 1 else 2)
    return dict(common, slices=slices, stages=3, warps=4)


def shared_plan(pairs: int, max_len: int, spec: FusedAttnSpec) -> Plan | None:
    """Return the plan of slices that sequences share, for long contexts.

    The slices that just fill the card, two a sequence or more, shared out by length (`turn`) and read as e4m3_plan has
    it: one context of 16k among 15 of 1k takes 23 us, with as many slices each 78 (fused, H200).

    None where each sequence has as many. With 64 at most, which is what merges in two levels of eight, few pairs would
    not fill the card. Up to four sequences 3 of 20 to 28 us are left: with shared slices a pair's gaps had a longer
    tail, maybe for want of room beside the CTAs for what checks pages that land.
    """
    batch, full = pairs // spec.kv_heads, 8 * 132
    if max_len < 64 * spec.page or batch <= 4 or not 16 <= pairs <= full // 2:
        return None
    slices = min(full // spec.kv_heads, 64 * batch)
    return dict(slices=slices, most=min(64, slices), least=256, block=min(32, spec.page), stages=3, warps=1, bulk=True)


def e4m3_plan(pairs: int, max_len: int, spec: AttnSpec | FusedAttnSpec) -> Plan:
    """Return the plan for all keys of an e4m3 cache, at most 16 queries a pair.

    Long contexts: CTAs of one warp by bulk copies, eight to each of 132 multiprocessors, which hide each other's waits.
    Two buffers of 32 keys: with more, fewer CTAs would fit. The dependent launch is triggered after the loop: before
    it, it cost 17 us of 90 at 16 x 8k. Many short ones: as many CTAs as fit so; of 64 heads over 8, 32 x 1k took
    42.5 us whole, and take 24.5 in four slices (fused, H200).
    """
    blocks = count_blocks(max_len, spec.page)
    one_warp = dict(block=spec.page, warps=1, early=False)
    slices = min(8 * 132 // pairs, 132, blocks // 8)
    if blocks >= 64 and slices > 1:
        return dict(one_warp, slices=slices, block=min(32, spec.page), stages=3, bulk=True)
    slices = max(1, min((396 if pairs <= 64 else 8 * 132) // pairs, blocks))
    if slices == 1:
        return dict(one_warp, slices=1, stages=4 if spec.head_dim > 64 else 6)
    if pairs > 64:
        return dict(slices=1 << slices.bit_length() - 1, block=spec.page, stages=3, warps=1)
    if pairs == 64:
        return dict(one_warp, slices=slices, stages=3, bulk=True)
    return dict(slices=min(slices, 64), block=min(64, spec.page), stages=2, warps=2)


def count_blocks(num_keys: int, page: int) -> int:
    return max(1, triton.cdiv(num_keys, page))


def merge_plan(slices: int, live: int, head_dim: int, warps: int) -> dict[str, int]:
    """Return how slices are merged.

    Slices to a group of the first level, the height of a merged state, and how many states fit in the registers.
    """
    pad = triton.next_power_of_2(live)
    group = max(2, triton.next_power_of_2(slices)) if slices <= 16 else 8 if slices <= 64 else 16
    return dict(GROUP=group, PAD=pad, CHUNK=max(1, min(group, 4096 * warps // (pad * head_dim))))


def num_counted(slices: int, merge: dict[str, int]) -> int:
    """Counters of a sequence and KV head: one for each group, and one for the groups."""
    return triton.cdiv(slices, merge["GROUP"]) + 1 if slices > 1 else 0


def split_workspace(
    workspace: Tensor, num_states: int, num_counters: int, rows: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of the workspace.

    Counters first, at a place that no plan moves, since they must stay zero between launches of different plans.
    """
    counter, rest = workspace[:COUNTERS_NBYTES].view(torch.int32), workspace[COUNTERS_NBYTES:].view(torch.float32)
    split = num_states * rows * head_dim
    end = split + num_states * rows * 2
    assert num_counters <= counter.numel() and end <= rest.numel(), "workspace too small"
    return rest[:split], rest[split:end], counter
