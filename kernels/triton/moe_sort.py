# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""Assignments of tokens to experts, sorted by expert: always to the same order, without atomics.

Kernels that sort many of them let the next one begin only when they are done: begun at once, its CTAs take the places
of those that still work, and 65 536 assignments to 128 experts took 28 us where these take 21 one after the other
(H200).
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.specs import MoESpec
from kernels.triton.common import pdl_launch, pdl_start, pdl_wait
from kernels.workspace import sort_chunk

FEW_ASSIGNMENTS, FEW_COMPARES = 512, 1 << 16
"""Up to which the sort is one launch: all assignments beside all experts in the registers of each CTA."""


@triton.jit(do_not_specialize=["total", "max_tiles"])
def sort_kernel(
    id_ptr, sorted_ptr, tile_ptr, total, max_tiles,
    E: tl.constexpr, PAD_E: tl.constexpr, BX: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sort at most BLOCK assignments, one CTA an expert.

    Those of each in order, from its first row on, padded to whole tiles of BX. The CTA after the last expert says what
    is said of tiles.
    """
    expert = tl.program_id(0)
    e = tl.arange(0, PAD_E)
    i = tl.arange(0, BLOCK)
    pdl_start(PDL)
    pdl_wait(PDL)
    ids = tl.load(id_ptr + i, mask=i < total, other=-1)
    count = tl.sum((ids[:, None] == e[None, :]).to(tl.int32), 0)
    hit = ids == expert
    row = pad_expert(expert, count, sorted_ptr, tile_ptr, total, max_tiles, E, PAD_E, BX, BLOCK)
    tl.store(sorted_ptr + row + tl.cumsum(hit.to(tl.int32), 0) - 1, i, mask=hit)


@triton.jit
def pad_expert(
    expert, count, sorted_ptr, tile_ptr, total, max_tiles,
    E: tl.constexpr, PAD_E: tl.constexpr, BX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Says whose an expert's tiles are and which of their rows are nobody's.

    As expert E, which tiles nobody has, and behind them how many somebody has. Returns the expert's first row.
    """
    e = tl.arange(0, PAD_E)
    i = tl.arange(0, BLOCK)
    tiles = (count + BX - 1) // BX
    first_tile = tl.sum(tl.where(e < expert, tiles, 0), 0)
    if expert == E:
        for start in range(first_tile, max_tiles, BLOCK):
            tl.store(tile_ptr + start + i, -1, mask=start + i < max_tiles)
        tl.store(tile_ptr + max_tiles, first_tile)
    else:
        mine = tl.sum(tl.where(e == expert, count, 0), 0)
        own_tiles = tl.sum(tl.where(e == expert, tiles, 0), 0)
        for start in range(0, own_tiles, BLOCK):
            tl.store(tile_ptr + first_tile + start + i, expert, mask=start + i < own_tiles)
        for start in range(mine, own_tiles * BX, BLOCK):
            tl.store(sorted_ptr + first_tile * BX + start + i, total, mask=start + i < own_tiles * BX)
    return first_tile * BX


@triton.jit(do_not_specialize=["total"])
def count_kernel(
    id_ptr, count_ptr, total, E: tl.constexpr, PAD_E: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """How many of CHUNK assignments each expert has: [chunks, E]."""
    e = tl.arange(0, PAD_E)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    pdl_wait(PDL)
    ids = tl.load(id_ptr + i, mask=i < total, other=-1)
    count = tl.sum((ids[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(count_ptr + tl.program_id(0) * E + e, count, mask=e < E)
    pdl_start(PDL)


@triton.jit(do_not_specialize=["total", "max_tiles", "chunks"])
def scan_kernel(
    count_ptr, first_ptr, sorted_ptr, tile_ptr, total, max_tiles, chunks,
    E: tl.constexpr, PAD_E: tl.constexpr, BX: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find where each chunk's first assignment to an expert belongs, [chunks, E].

    And what sort_kernel says of tiles.
    """
    expert = tl.program_id(0)
    e = tl.arange(0, PAD_E)
    count = tl.zeros([PAD_E], tl.int32)
    pdl_wait(PDL)
    for start in range(0, chunks, ROWS):
        chunk = start + tl.arange(0, ROWS)
        mask = (chunk < chunks)[:, None] & (e < E)[None, :]
        count += tl.sum(tl.load(count_ptr + chunk[:, None] * E + e[None, :], mask=mask, other=0), 0)
    row = pad_expert(expert, count, sorted_ptr, tile_ptr, total, max_tiles, E, PAD_E, BX, 1024)
    for start in range(0, tl.where(expert < E, chunks, 0), 1024):
        chunk = start + tl.arange(0, 1024)
        own = tl.load(count_ptr + chunk * E + expert, mask=chunk < chunks, other=0)
        tl.store(first_ptr + chunk * E + expert, row + tl.cumsum(own, 0) - own, mask=chunk < chunks)
        row += tl.sum(own, 0)
    pdl_start(PDL)


@triton.jit(do_not_specialize=["total"])
def place_kernel(
    id_ptr, first_ptr, sorted_ptr, total, E: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """The assignments of a chunk, each behind those of the chunk to the same expert that come before it."""
    start = tl.program_id(0) * CHUNK
    i = start + tl.arange(0, CHUNK)
    pdl_wait(PDL)
    ids = tl.load(id_ptr + i, mask=i < total, other=-1)
    at = tl.load(first_ptr + tl.program_id(0) * E + ids, mask=i < total, other=0)
    for block in range(start, start + CHUNK, BLOCK):
        j = block + tl.arange(0, BLOCK)
        others = tl.load(id_ptr + j, mask=j < total, other=-1)
        at += tl.sum(((ids[:, None] == others[None, :]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    tl.store(sorted_ptr + at, i, mask=i < total)
    pdl_start(PDL)


def sort_by_expert(
    spec: MoESpec, ids: Tensor, count: Tensor, order: Tensor, tiles: Tensor, total: int, max_tiles: int, bx: int,
    pdl: bool,
) -> None:  # fmt: skip
    """tiles `[max_tiles + 1]`: the expert of each, or -1, and behind them how many have one.

    count: two numbers for each expert and chunk (kernels.workspace.sort_chunk).
    """
    block = triton.next_power_of_2(triton.next_power_of_2(total // spec.top_k) * spec.top_k)  # as the plan changes
    pad, chunk = triton.next_power_of_2(spec.experts), sort_chunk(spec.experts)
    common = dict(E=spec.experts, PDL=pdl, **pdl_launch(pdl))
    if block <= FEW_ASSIGNMENTS and block * pad <= FEW_COMPARES:
        sort_kernel[(spec.experts + 1,)](
            ids, order, tiles, total, max_tiles, PAD_E=pad, BX=bx, BLOCK=block,
            num_warps=min(8, max(1, pad * block // 1024)), **common,
        )  # fmt: skip
        return
    chunks = triton.cdiv(total, chunk)
    first = count[chunks * spec.experts :]
    rows = max(16, min(128, (1 << 14) // pad))
    count_kernel[(chunks,)](ids, count, total, PAD_E=pad, CHUNK=chunk, num_warps=4, **common)
    scan_kernel[(spec.experts + 1,)](
        count, first, order, tiles, total, max_tiles, chunks, PAD_E=pad, BX=bx, ROWS=rows, num_warps=8, **common
    )
    place_kernel[(chunks,)](ids, first, order, total, CHUNK=chunk, BLOCK=min(32, chunk), num_warps=8, **common)
