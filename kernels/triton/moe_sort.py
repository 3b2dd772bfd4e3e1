# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""Assignments of tokens to experts, sorted by expert: always to the same order, without atomics."""

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
    """At most BLOCK assignments, one CTA an expert: those of each in order, from its first row on, padded to whole
    tiles of BX. The CTA after the last expert says what is said of tiles."""
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
    """Says whose an expert's tiles are and which of their rows are nobody's; as expert E, which tiles nobody has, and
    behind them how many somebody has. Returns the expert's first row."""
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
    pdl_start(PDL)
    pdl_wait(PDL)
    ids = tl.load(id_ptr + i, mask=i < total, other=-1)
    count = tl.sum((ids[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(count_ptr + tl.program_id(0) * E + e, count, mask=e < E)


@triton.jit(do_not_specialize=["total", "max_tiles", "chunks"])
def place_kernel(
    id_ptr, count_ptr, sorted_ptr, tile_ptr, total, max_tiles, chunks,
    E: tl.constexpr, PAD_E: tl.constexpr, BX: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What sort_kernel does, of any number of assignments: a CTA for each chunk that was counted puts its assignments
    where those of the chunks before leave off; the CTAs behind them are experts, and say what is said of tiles. FEW
    assignments or chunks, beside all experts, are in the registers at a time."""
    chunk = tl.program_id(0)
    e = tl.arange(0, PAD_E)
    few = tl.arange(0, FEW)
    count = tl.zeros([PAD_E], tl.int32)
    before = tl.zeros([PAD_E], tl.int32)
    pdl_start(PDL)
    pdl_wait(PDL)
    for start in range(0, chunks, FEW):
        other = start + few
        counts = tl.load(
            count_ptr + other[:, None] * E + e[None, :], mask=(other < chunks)[:, None] & (e < E)[None, :], other=0
        )
        count += tl.sum(counts, 0)
        before += tl.sum(tl.where((other < chunk)[:, None], counts, 0), 0)
    if chunk >= chunks:
        pad_expert(chunk - chunks, count, sorted_ptr, tile_ptr, total, max_tiles, E, PAD_E, BX, FEW)
    else:
        tiles = (count + BX - 1) // BX
        row = (tl.cumsum(tiles, 0) - tiles) * BX + before
        for start in range(0, CHUNK, FEW):
            i = chunk * CHUNK + start + few
            ids = tl.load(id_ptr + i, mask=i < total, other=-1)
            hit = ids[:, None] == e[None, :]
            rank = tl.sum(((ids[:, None] == ids[None, :]) & (few[None, :] < few[:, None])).to(tl.int32), 1)
            at = tl.sum(tl.where(hit, row[None, :], 0), 1) + rank
            tl.store(sorted_ptr + at, i, mask=i < total)
            row += tl.sum(hit.to(tl.int32), 0)


def sort_by_expert(
    spec: MoESpec, ids: Tensor, count: Tensor, order: Tensor, tiles: Tensor, total: int, max_tiles: int, bx: int,
    pdl: bool,
) -> None:  # fmt: skip
    """tiles `[max_tiles + 1]`: the expert of each, or -1, and behind them how many have one."""
    block = triton.next_power_of_2(triton.next_power_of_2(total // spec.top_k) * spec.top_k)  # as the plan changes
    pad, chunk = triton.next_power_of_2(spec.experts), sort_chunk(spec.experts)
    common = dict(E=spec.experts, PAD_E=pad, PDL=pdl, **pdl_launch(pdl))
    if block <= FEW_ASSIGNMENTS and block * pad <= FEW_COMPARES:
        sort_kernel[(spec.experts + 1,)](
            ids, order, tiles, total, max_tiles, BX=bx, BLOCK=block, num_warps=min(8, max(1, pad * block // 1024)),
            **common,
        )  # fmt: skip
        return
    chunks = triton.cdiv(total, chunk)
    count_kernel[(chunks,)](ids, count, total, CHUNK=chunk, num_warps=8, **common)
    place_kernel[(chunks + spec.experts + 1,)](
        ids, count, order, tiles, total, max_tiles, chunks, BX=bx, CHUNK=chunk, FEW=chunk // 4, num_warps=8, **common
    )
