# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""Prefill attention in parts.

The keys of a tile of queries shared out among several CTAs, whose states are merged.

Part p of every sequence is its keys p * span to (p + 1) * span, whatever its length: a CTA whose part its tile does not
see returns at once, and a row has as many states as parts it sees. `span` and the number of parts are plain numbers to
the kernels, so that no batch compiles anything.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.specs import AttnSpec
from kernels.triton.attn_state import finish, fresh
from kernels.triton.relaunch import BatchLaunches

# In keys: what a CTA costs beyond those it reads, what it costs to publish and merge a state, and the shortest part.
START, MERGE, LEAST = 384, 320, 256


@dataclass(frozen=True)
class Parts:
    """`count` parts of `span` keys; `states`: room for what they publish, float32."""

    count: int
    span: int
    states: Tensor


def state_nbytes(spec: AttnSpec, num_rows: int) -> int:
    """Return the size of what one part of the keys leaves of these rows."""
    return 4 * num_rows * spec.q_heads * (spec.head_dim + 2)


def share_keys(
    spec: AttnSpec, num_rows: int, max_q: int, max_kv: int, batch: int, bm: int, pack: int, block: int, sms: int,
    scratch: Tensor,
) -> Parts:  # fmt: skip
    """For tiles of `bm` rows, `pack` heads of each of their queries.

    No more parts than `scratch` has room for. `sms`: multiprocessors.
    """
    queries, blocks = bm // pack, triton.cdiv(max_kv, block)
    states = scratch[: scratch.numel() // 16 * 16].view(torch.float32)
    room = 4 * states.numel() // state_nbytes(spec, num_rows)
    tiles = min(triton.cdiv(max_q, queries) * batch, num_rows // queries + batch) * spec.q_heads // pack
    count = 1 if spec.window else max(1, min(num_parts(tiles, max_kv, sms * 128 // bm), room))
    span = triton.cdiv(blocks, count)
    return Parts(triton.cdiv(blocks, span), span * block, states)


def num_parts(tiles: int, keys: int, slots: int) -> int:
    """Return the number of parts.

    The one with which the last CTA ends soonest, where `slots` of them run at a time: 1, or what fills one to four
    waves.
    """

    def cost(parts: int) -> float:
        return triton.cdiv(tiles * parts, slots) * (keys / parts + START + (MERGE if parts > 1 else 0))

    return min([1, *(max(1, min(waves * slots // tiles, keys // LEAST)) for waves in range(1, 5))], key=cost)


@triton.jit
def publish_rows(state_ptr, states, at, m, den, acc, there, D: tl.constexpr):
    """Write states where the merge finds them.

    The values of all `states` first, then their maxima, then their sums.
    """
    d = tl.arange(0, D)
    tl.store(state_ptr + at[:, None] * D + d[None, :], acc, mask=there[:, None])
    tl.store(state_ptr + states * D + at, m, mask=there)
    tl.store(state_ptr + states * (D + 1) + at, den, mask=there)


@triton.jit(do_not_specialize=["parts", "span", "num_rows"])
def merge_parts_kernel(
    state_ptr, len_ptr, start_ptr, sink_ptr, out_ptr, lse_ptr, v_scale, parts, span, num_rows,
    HQ: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """One head of one query: its states as one, normalized. CHUNK states are loaded at once.

    By a warp: four warps that merged eight heads took 25 us where this takes 7 (256 queries in two parts, H200)."""
    query = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    first = tl.load(start_ptr + seq)
    count = tl.load(start_ptr + seq + 1) - first
    if query >= count:
        return
    seen = tl.cdiv(tl.load(len_ptr + seq) - count + query + 1, span)
    row = (first + query).to(tl.int64) * HQ + head
    plane = num_rows.to(tl.int64) * HQ
    d = tl.arange(0, D)
    m, den, acc = fresh(1, D)
    for start in range(0, seen, CHUNK):
        part = start + tl.arange(0, CHUNK)
        there = part < seen
        at = part * plane + row
        m_j = tl.load(state_ptr + parts * plane * D + at, mask=there, other=-1.0e30)
        den_j = tl.load(state_ptr + parts * plane * (D + 1) + at, mask=there, other=0.0)
        acc_j = tl.load(state_ptr + at[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
        m_new = tl.maximum(m, tl.max(m_j, 0))
        alpha = tl.exp2(m - m_new)
        weight = tl.exp2(m_j - m_new)
        den = den * alpha + tl.sum(den_j * weight, 0)
        acc = acc * alpha[:, None] + tl.sum(acc_j * weight[:, None], 0)[None, :]
        m = m_new
    one = tl.arange(0, 1)
    y, lse = finish(m, den, acc, sink_ptr, one + head, one == 0, SINKS)
    tl.store(out_ptr + row * D + d[None, :], (y * v_scale).to(out_ptr.dtype.element_ty))
    if LSE:
        tl.store(lse_ptr + row + one, lse)


def merge_parts(
    launches: BatchLaunches, spec: AttnSpec, parts: Parts, seq_lens: Tensor, q_starts: Tensor, sinks: Tensor,
    out: Tensor, lse: Tensor, max_q: int, v_scale: float,
) -> None:  # fmt: skip
    launches.launch(
        merge_parts_kernel, (max_q, spec.q_heads, seq_lens.shape[0]),
        (parts.states, seq_lens, q_starts, sinks, out, lse, v_scale, parts.count, parts.span, out.shape[0]),
        HQ=spec.q_heads, D=spec.head_dim, CHUNK=8, SINKS=spec.sinks, LSE=spec.lse, num_warps=1,
    )  # fmt: skip
