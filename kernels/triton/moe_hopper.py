# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""FP8 products of experts of many rows and no bias, with SiLU between, for Hopper in Gluon.

Rows are copied as they are sorted by expert, padded to whole tiles, so that the copy engine brings both sides of a
product. As many CTAs as there are multiprocessors go through the tiles; what a CTA reads next is on its way while it
finishes a tile. Threads that gather the rows themselves save the copy, and were slower where the card's power is the
limit (docs/design/kernels.md).
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.plans import Plan
from kernels.specs import MoESpec
from kernels.triton.common import pdl_launch, pdl_start, pdl_wait
from kernels.triton.gemm_hopper import E4M3_MAX, cta_barrier, depend_start, depend_wait, descriptor
from kernels.triton.moe_shared import Weights
from kernels.workspace import FULL_TILE

TILE = gl.constexpr(FULL_TILE)  # rows, and columns of each of the two products that a CTA has in hand
GATHERED = 8  # rows that a CTA copies
BAND = gl.constexpr(8)  # tiles of rows that go through the columns together


@triton.jit(do_not_specialize=["total"])
def gather_kernel(
    x_ptr, scale_ptr, sorted_ptr, tile_ptr, out_ptr, out_scale_ptr, total, K: tl.constexpr, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, BX: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of tokens and their scales as they are sorted; those that only pad a tile are left as they are."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    pdl_start(PDL)
    pdl_wait(PDL)
    if tl.load(tile_ptr + tl.program_id(0) * ROWS // BX) < 0:
        return
    assigned = tl.load(sorted_ptr + row)
    live = assigned < total
    token = assigned // TOP_K
    tl.store(out_scale_ptr + row, tl.load(scale_ptr + token, mask=live, other=0.0))
    for start in range(0, K, BLOCK):
        mask = live[:, None] & (start + col < K)[None, :]
        x = tl.load(x_ptr + token[:, None].to(tl.int64) * K + start + col[None, :], mask=mask)
        tl.store(out_ptr + row[:, None].to(tl.int64) * K + start + col[None, :], x, mask=mask)


@gluon.jit
def place(item, tile_ptr, num_tiles, num_items, COLUMNS: gl.constexpr):
    """Tile of rows, tile of columns, and expert of an item.

    The columns of BAND tiles are gone through before the next band's, so that an expert's weights are read from memory
    about once.
    """
    band = item // (BAND * COLUMNS)
    within = item % (BAND * COLUMNS)
    height = gl.maximum(gl.minimum(num_tiles - band * BAND, BAND), 1)
    tile = band * BAND + within % height
    column = within // height
    expert = gl.load(tile_ptr + tile, mask=item < num_items, other=0)
    return tile, column, expert


@gluon.jit
def bring(w_desc, x_desc, row, token, k, done, a_smem, b_smem, x_smem, APART: gl.constexpr, pred):
    """One step: 128 columns of two tiles of weights, APART rows from each other, and of one tile of rows."""
    mbarrier.expect(done, 3 * TILE * TILE, pred=pred)
    tma.async_copy_global_to_shared(x_desc, [token, k], done, x_smem, pred=pred)
    tma.async_copy_global_to_shared(w_desc, [row, k], done, a_smem, pred=pred)
    tma.async_copy_global_to_shared(w_desc, [row + APART, k], done, b_smem, pred=pred)


@gluon.jit
def finish_middle(
    gate, up, x_scale, expert, tile, column, num_rows, out_ptr, w_scale_ptr, out_scale_ptr,
    N: gl.constexpr, layout: gl.constexpr, flat: gl.constexpr,
):  # fmt: skip
    """SiLU, rounded with a scale for each row and 128 columns."""
    row = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    at = expert * N + column * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
    gate = gate * gl.load(w_scale_ptr + at)[None, :] * x_scale[:, None]
    up = up * gl.load(w_scale_ptr + at + N // 2)[None, :] * x_scale[:, None]
    y = gate / (1.0 + gl.exp(-gate)) * up
    group = gl.maximum(gl.max(gl.abs(y), 1), 1e-6) / E4M3_MAX
    gl.store(out_scale_ptr + column * num_rows + row, group)
    y = gl.minimum(gl.maximum(y / group[:, None], -E4M3_MAX), E4M3_MAX)
    rounded = gl.convert_layout(y.to(gl.float8e4nv), flat)
    rows = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, flat))
    cols = column * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, flat))
    gl.store(out_ptr + rows[:, None].to(gl.int64) * (N // 2) + cols[None, :], rounded)


@gluon.jit
def finish_rows(
    acc, expert, tile, column, total, out_ptr, w_scale_ptr, sorted_ptr,
    N: gl.constexpr, layout: gl.constexpr, flat: gl.constexpr,
):  # fmt: skip
    """128 columns from `column` on, to where their assignments are."""
    at = expert * N + column + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
    acc = acc * gl.load(w_scale_ptr + at)[None, :]
    rows = gl.load(sorted_ptr + tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, flat)))
    cols = column + gl.arange(0, TILE, layout=gl.SliceLayout(0, flat))
    value = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), flat)
    gl.store(out_ptr + rows[:, None].to(gl.int64) * N + cols[None, :], value, mask=(rows < total)[:, None])


@gluon.jit(do_not_specialize=["total", "max_tiles"])
def expert_tiles_kernel(
    w_desc, x_desc, out_ptr, w_scale_ptr, x_scale_ptr, out_scale_ptr, sorted_ptr, tile_ptr, total, max_tiles,
    N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """x lies as its rows are sorted.

    FIRST: rows n and N / 2 + n of w are gate and up, out is the activated middle in e4m3, sorted too, with scales [N /
    2 / 128, rows]. Otherwise x is that middle, and rows of out are assignments. How many tiles experts have is at
    tile_ptr + max_tiles.
    """
    WIDTH: gl.constexpr = TILE if FIRST else 2 * TILE
    APART: gl.constexpr = N // 2 if FIRST else TILE
    COLUMNS: gl.constexpr = (N // 2 if FIRST else N) // WIDTH
    STEPS: gl.constexpr = K // TILE
    AHEAD: gl.constexpr = STAGES - 1
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 128, 32])
    flat: gl.constexpr = gl.BlockedLayout([1, 16 if FIRST else 8], [4, 8] if FIRST else [2, 16], [num_warps, 1], [1, 0])
    a_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, TILE], w_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, TILE], w_desc.layout)
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, TILE], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    depend_wait(PDL)
    num_tiles = gl.load(tile_ptr + max_tiles)
    num_items, num_rows = num_tiles * COLUMNS, max_tiles * TILE
    item = gl.program_id(0)
    tile, column, expert = place(item, tile_ptr, num_tiles, num_items, COLUMNS)
    for i in gl.static_range(AHEAD):
        bring(
            w_desc, x_desc, expert * N + column * WIDTH, tile * TILE, i * TILE, full.index(i), a_smem.index(i),
            b_smem.index(i), x_smem.index(i), APART, item < num_items,
        )  # fmt: skip
    count = 0
    while item < num_items:
        follower = item + gl.num_programs(0)
        has_more = follower < num_items
        next_tile, next_column, next_expert = place(follower, tile_ptr, num_tiles, num_items, COLUMNS)
        row, next_row = expert * N + column * WIDTH, next_expert * N + next_column * WIDTH
        one = gl.zeros([TILE, TILE], gl.float32, layout)
        two = gl.zeros([TILE, TILE], gl.float32, layout)
        scale_at = x_scale_ptr + tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
        scale = gl.load(scale_at)
        for step in range(STEPS):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            x, a, b = x_smem.index(slot), a_smem.index(slot).permute((1, 0)), b_smem.index(slot).permute((1, 0))
            if FIRST:
                one = warpgroup_mma(x, a, one, is_async=True)
                two = warpgroup_mma(x, b, two, is_async=True)
                one, two = warpgroup_mma_wait(2, deps=[one, two])
            cta_barrier()  # every warp is done with the step before
            wraps = step + AHEAD >= STEPS
            ahead = (count + AHEAD) % STAGES
            bring(
                w_desc, x_desc, gl.where(wraps, next_row, row), gl.where(wraps, next_tile, tile) * TILE,
                (step + AHEAD - gl.where(wraps, STEPS, 0)) * TILE, full.index(ahead), a_smem.index(ahead),
                b_smem.index(ahead), x_smem.index(ahead), APART, (step + AHEAD < STEPS) | has_more,
            )  # fmt: skip
            if not FIRST:
                zero = gl.zeros([TILE, TILE], gl.float32, layout)
                part = warpgroup_mma(x, a, zero, use_acc=False, is_async=True)
                following = gl.load(scale_at + gl.minimum(step + 1, STEPS - 1) * num_rows)
                part = warpgroup_mma_wait(0, deps=[part])
                one += part * scale[:, None]
                part = warpgroup_mma(x, b, zero, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=[part])
                two += part * scale[:, None]
                scale = following
            count += 1
        if FIRST:
            one, two = warpgroup_mma_wait(0, deps=[one, two])
            finish_middle(
                one, two, scale, expert, tile, column, num_rows, out_ptr, w_scale_ptr, out_scale_ptr, N, layout, flat,
            )  # fmt: skip
        else:
            finish_rows(
                one, expert, tile, column * WIDTH, total, out_ptr, w_scale_ptr, sorted_ptr, N, layout, flat,
            )  # fmt: skip
            finish_rows(
                two, expert, tile, column * WIDTH + TILE, total, out_ptr, w_scale_ptr, sorted_ptr, N, layout, flat,
            )  # fmt: skip
        item, tile, column, expert = follower, next_tile, next_column, next_expert
    depend_start(PDL)


def products(
    spec: MoESpec, plan: Plan, grid: tuple[int], x: Tensor, x_scale: Tensor, first: Weights, second: Weights,
    room: Sequence[Tensor], pdl: bool,
) -> None:  # fmt: skip
    """`room`: kernels.triton.moe.carve's with `sorts_rows`, assignments sorted.

    Its rows before the sum are written.
    """
    middle, group_scale, y, _, order, tiles, copy, copy_scale = room
    total, max_tiles = len(x) * spec.top_k, tiles.numel() - 1
    middle, copy = middle.view(-1, spec.inter), copy.view(-1, spec.hidden)
    gather(x, x_scale, spec.top_k, order, tiles, copy, copy_scale, pdl)
    common = dict(STAGES=plan["stages"], PDL=pdl, num_warps=plan["warps"], **pdl_launch(pdl))
    (w1, s1, _), (w2, s2, _) = first, second
    expert_tiles_kernel[grid](
        box(w1), box(copy), middle, s1, copy_scale, group_scale, order, tiles, total, max_tiles, N=2 * spec.inter,
        K=spec.hidden, FIRST=True, **common,
    )  # fmt: skip
    expert_tiles_kernel[grid](
        box(w2), box(middle), y, s2, group_scale, group_scale, order, tiles, total, max_tiles, N=spec.hidden,
        K=spec.inter, FIRST=False, **common,
    )  # fmt: skip


def gather(
    x: Tensor, x_scale: Tensor, top_k: int, order: Tensor, tiles: Tensor, copy: Tensor, copy_scale: Tensor,
    pdl: bool,
) -> None:  # fmt: skip
    """Rows of x and their scales, as `order` has them."""
    tokens, width = x.shape
    gather_kernel[(len(order) // GATHERED,)](
        x, x_scale, order, tiles, copy, copy_scale, tokens * top_k, K=width, TOP_K=top_k, ROWS=GATHERED,
        BX=len(order) // (len(tiles) - 1), BLOCK=min(2048, triton.next_power_of_2(width)), PDL=pdl, num_warps=4,
        **pdl_launch(pdl),
    )  # fmt: skip


def box(matrix: Tensor) -> TensorDescriptor:
    """Return a descriptor of tiles of rows, those of all experts one after the other."""
    return descriptor(matrix.view(-1, matrix.shape[-1]), FULL_TILE, FULL_TILE)
