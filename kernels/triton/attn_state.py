# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""The state of an online softmax over paged keys.

Running max, sum, weighted values; shared by the decode kernels.
"""

import triton
import triton.language as tl

from kernels.triton.common import INTERPRETED, LN2, LOG2E


@triton.jit
def share(slice_id, first, length, BLOCK: tl.constexpr, slices):
    """The keys lo..hi of one slice: whole blocks, shared out evenly.

    The slice with the last key has lo < length == hi; where there are fewer blocks than slices, some have lo >= hi.
    """
    blocks = tl.cdiv(length - first, BLOCK)
    lo = first + tl.cdiv(slice_id * blocks, slices) * BLOCK
    return lo, tl.minimum(first + tl.cdiv((slice_id + 1) * blocks, slices) * BLOCK, length)


@triton.jit
def turn(place, len_ptr, num_seqs, SLICES: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr, SEQS: tl.constexpr):
    """Return what the CTA at `place` reads.

    Sequences have SLICES together, of about as many keys each: the sequence, which of its slices, how many it has, and
    the place of the first. Each has one at least and MOST at most, none of less than LEAST keys but for its end. Behind
    the last place, which is SLICES at most, the sequence is num_seqs or more. num_seqs <= SLICES; SEQS: a power of 2
    from num_seqs on.
    """
    j = tl.arange(0, SEQS)
    lengths = tl.load(len_ptr + j, mask=j < num_seqs, other=0)
    total = tl.sum(lengths, 0)
    # The fewest keys to a slice with which there are not too many slices: between these two, found to a sixteenth.
    few, many = tl.cdiv(total, SLICES), tl.cdiv(total, SLICES - num_seqs + 1)
    for _ in tl.static_range(4):
        middle = (few + many) // 2
        fits = tl.sum(tl.cdiv(lengths, middle), 0) <= SLICES
        few, many = tl.where(fits, few, middle), tl.where(fits, middle, many)
    slices = tl.minimum(tl.cdiv(lengths, tl.maximum(many, LEAST)), MOST)
    ends = tl.cumsum(slices, 0)
    seq = tl.sum((ends <= place).to(tl.int32), 0)
    count = tl.sum(tl.where(j == seq, slices, 0), 0)
    first = tl.sum(tl.where(j == seq, ends, 0), 0) - count
    return seq, place - first, count, first


@triton.jit
def fresh(ROWS: tl.constexpr, D: tl.constexpr):
    """The state of an online softmax that has seen nothing: running max, sum, weighted values."""
    return tl.full([ROWS], -1.0e30, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)


SPLIT_PAIRS = tl.constexpr("""{
.reg .b32 t;
.reg .b16 even, odd;
prmt.b32 t, $2, 0, 0x3120;
mov.b32 {even, odd}, t;
cvt.rn.f16x2.e4m3x2 $0, even;
cvt.rn.f16x2.e4m3x2 $1, odd;
}""")


@triton.jit
def split_pairs(v16):
    """Pairs of e4m3 values along the head as 16-bit words, to the even and the odd columns in fp16.

    The second product wants keys side by side in a register, the cache has columns side by side. Words of 16 bits can
    be transposed on their way out of shared memory; bytes cannot, and were loaded one by one: 256 loads a page.
    """
    if INTERPRETED:
        even = (v16 & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = ((v16 >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        even, odd = tl.inline_asm_elementwise(
            SPLIT_PAIRS, "=r,=r,r", [v16], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return even, odd


@triton.jit
def finish(m, den, acc, sink_ptr, q_head, live, SINKS: tl.constexpr):
    """Add the sinks (a logit per head that takes weight and gives no value) and normalize.

    Also returns the LSE.
    """
    if SINKS:
        sink = tl.load(sink_ptr + q_head, mask=live, other=0.0).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, sink)
        acc = acc * tl.exp2(m - m_new)[:, None]
        den = den * tl.exp2(m - m_new) + tl.exp2(sink - m_new)
        m = m_new
    safe = tl.where(live & (den > 0), den, 1.0)
    return acc / safe[:, None], (m + tl.log2(safe)) * LN2


@triton.jit
def publish(mid_ptr, ml_ptr, at, m, den, acc, row, live, ROWS: tl.constexpr, D: tl.constexpr):
    """Write a state where another CTA can merge it."""
    d = tl.arange(0, D)
    tl.store(mid_ptr + (at * ROWS + row)[:, None] * D + d[None, :], acc, mask=live[:, None])
    tl.store(ml_ptr + at * 2 * ROWS + row, m, mask=live)
    tl.store(ml_ptr + at * 2 * ROWS + ROWS + row, den, mask=live)


@triton.jit
def merge_states(
    mid_ptr, ml_ptr, first, count,
    ROWS: tl.constexpr, LIVE: tl.constexpr, PAD: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`count` published states (at most WIDTH), each STEP behind the one before, as one, PAD rows high.

    CHUNK of them are loaded at once, as many as the registers hold: what a merge costs is the number of times it waits
    for memory.
    """
    r = tl.arange(0, PAD)
    d = tl.arange(0, D)
    j = tl.arange(0, WIDTH)
    row_of = (first + j * STEP)[:, None] * 2 * ROWS + r[None, :]
    there = (j < count)[:, None] & (r < LIVE)[None, :]
    # .cg: other multiprocessors wrote these, and this one's L1 may hold what was there before
    m_j = tl.load(ml_ptr + row_of, mask=there, other=-1.0e30, cache_modifier=".cg")
    den_j = tl.load(ml_ptr + row_of + ROWS, mask=there, other=0.0, cache_modifier=".cg")
    m = tl.max(m_j, 0)
    den = tl.sum(den_j * tl.exp2(m_j - m[None, :]), 0)
    acc = tl.zeros([PAD, D], tl.float32)
    for start in tl.static_range(0, WIDTH, CHUNK):
        i = start + tl.arange(0, CHUNK)
        some = (i < count)[:, None] & (r < LIVE)[None, :]
        m_i = tl.load(
            ml_ptr + (first + i * STEP)[:, None] * 2 * ROWS + r[None, :], mask=some, other=-1.0e30, cache_modifier=".cg"
        )
        at = ((first + i * STEP)[:, None] * ROWS + r[None, :])[:, :, None] * D + d[None, None, :]
        part = tl.load(mid_ptr + at, mask=some[:, :, None], other=0.0, cache_modifier=".cg")
        acc += tl.sum(part * tl.exp2(m_i - m[None, :])[:, :, None], 0)
    return m, den, acc


@triton.jit
def store_rows(
    m, den, acc, sink_ptr, out_ptr, lse_ptr, v_scale, seq, head,
    row, HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, Q_LEN: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr,
):  # fmt: skip
    """Normalize and write the rows of a finished state; those below Q_LEN * G are (query, head) pairs."""
    d = tl.arange(0, D)
    live = row < Q_LEN * G
    query = seq * Q_LEN + row // G
    q_head = head * G + row % G
    y, lse = finish(m, den, acc, sink_ptr, q_head, live, SINKS)
    at = (query * HQ + q_head)[:, None] * D + d[None, :]
    tl.store(out_ptr + at, (y * v_scale).to(out_ptr.dtype.element_ty), mask=live[:, None])
    if LSE:
        tl.store(lse_ptr + query * HQ + q_head, lse, mask=live)
