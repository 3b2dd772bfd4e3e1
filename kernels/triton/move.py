# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""KV pages to a contiguous buffer and back in one launch, with conversion and checksum on the way.

Few large CTAs: at 8 CTAs, 16 warps with 32 KiB in flight move 1.6 times what 8 warps with 16 KiB do (H200), and a copy
that runs beside prefill's products must get by with few multiprocessors.

Neither seed, units nor first are specialized: each that is divisible by 16 would compile anew, in the middle of a
handoff.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.move import check_block
from kernels.specs import MoveSpec
from kernels.triton.common import to_e4m3

FACTOR = tl.constexpr(16777619)
STRIDE = tl.constexpr(40503)


@triton.jit
def place(unit, PLANES: tl.constexpr, ROW: tl.constexpr):
    """Return where a unit lies in the buffer."""
    if ROW == PLANES:
        return unit
    return unit // PLANES * ROW + unit % PLANES


@triton.jit(do_not_specialize=["units", "seed", "first"])
def move_kernel(
    src_ptr, dst_ptr, page_ptr, sum_ptr, bad_ptr, units, stride_plane, stride_page, offset, seed, first,
    PLANES: tl.constexpr, ROW: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """Over units (page u // PLANES, plane u % PLANES).

    The buffer has ROW units for a page, those of other launches behind ours. MODE 0: pages to buffer; 1: buffer to
    pages; 2: only read pages; 3: only read the buffer. SUM: 1 write the unit's checksum, 2 compare it and set bad. Its
    columns count from `first` on.
    """
    i = tl.arange(0, BLOCK)
    wide = tl.zeros([], tl.int64)  # offsets into a cache pass 2^31
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0)):
        page = tl.load(page_ptr + unit // PLANES).to(tl.int64)
        scattered = page * stride_page + (wide + unit % PLANES) * stride_plane + offset
        flat = (wide + place(unit, PLANES, ROW)) * WORDS
        src = src_ptr + (flat if MODE == 1 or MODE == 3 else scattered)
        dst = dst_ptr + (scattered if MODE == 1 else flat)
        column = tl.zeros([BLOCK], tl.int32)
        for step in tl.range(0, WORDS, BLOCK, loop_unroll_factor=2):
            word = tl.load(src + step + i)
            if MODE < 2:
                tl.store(dst + step + i, word)
            if SUM > 0:
                column = column * FACTOR + word
        if SUM > 0:
            digest = tl.sum((column * (2 * (first + i) + 1)).to(tl.int64), 0).to(tl.int32) ^ (seed + unit * STRIDE)
            if SUM == 1:
                tl.store(sum_ptr + unit, digest)
            elif tl.load(sum_ptr + unit) != digest:
                tl.store(bad_ptr, 1)


@triton.jit
def narrow(bits, inv_scale):
    """The low 16 bits, a bf16, times inv_scale as the bits of an e4m3."""
    value = (bits << 16).to(tl.int32).to(tl.float32, bitcast=True) * inv_scale
    return to_e4m3(value).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit(do_not_specialize=["units", "seed"])
def convert_kernel(
    src_ptr, dst_ptr, page_ptr, sum_ptr, units, stride_plane, stride_page, offset, inv_ptr, seed,
    PLANES: tl.constexpr, ROW: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Round pages to e4m3 on their way to the buffer.

    bf16 pages, read four elements at a time as int64, to the 32-bit words of an e4m3 buffer, with their checksum; each
    plane's by its own inverse scale.
    """
    i = tl.arange(0, BLOCK)
    wide = tl.zeros([], tl.int64)  # offsets into a cache pass 2^31
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0)):
        page = tl.load(page_ptr + unit // PLANES).to(tl.int64)
        src = src_ptr + page * stride_page + (wide + unit % PLANES) * stride_plane + offset
        inv_scale = tl.load(inv_ptr + unit % PLANES)
        column = tl.zeros([BLOCK], tl.int32)
        for step in tl.range(0, WORDS, BLOCK, loop_unroll_factor=2):
            four = tl.load(src + step + i)
            low = narrow(four, inv_scale) | (narrow(four >> 16, inv_scale) << 8)
            word = low | (narrow(four >> 32, inv_scale) << 16) | (narrow(four >> 48, inv_scale) << 24)
            tl.store(dst_ptr + (wide + place(unit, PLANES, ROW)) * WORDS + step + i, word)
            if SUM:
                column = column * FACTOR + word
        if SUM:
            digest = tl.sum((column * (2 * i + 1)).to(tl.int64), 0).to(tl.int32) ^ (seed + unit * STRIDE)
            tl.store(sum_ptr + unit, digest)


def kv_pack(
    spec: MoveSpec, cache: Tensor, pages: Tensor, buffer: Tensor, sums: Tensor | None,
    *, seed: int = 0, offset: int = 0, inv_scales: Tensor | None = None, ctas: int = 264,
) -> None:  # fmt: skip
    if not spec.convert:
        launch(spec, cache, buffer, pages, sums, sums, 0, 1 if spec.checksum else 0, seed, offset, ctas, 0)
        return
    units, fours, flat = len(pages) * spec.planes, cache.view(torch.int64), buffer.view(torch.int32)
    assert inv_scales is not None, "values are rounded by a scale for each plane"
    convert_kernel[(min(ctas, units),)](
        fours, flat, pages, flat if sums is None else sums, units, fours.stride(0), fours.stride(1), offset // 4,
        inv_scales, seed, PLANES=spec.planes, ROW=row_units(spec, buffer), WORDS=spec.unit_nbytes // 4,
        BLOCK=check_block(spec.unit_nbytes), SUM=spec.checksum, num_warps=16,
    )  # fmt: skip


def kv_unpack(
    spec: MoveSpec, buffer: Tensor, cache: Tensor, pages: Tensor, sums: Tensor | None, bad: Tensor,
    *, seed: int = 0, offset: int = 0, ctas: int = 264,
) -> None:  # fmt: skip
    launch(spec, cache, buffer, pages, sums, bad, 1, 2 if spec.checksum else 0, seed, offset, ctas, 0)


def kv_sums(
    spec: MoveSpec, cache: Tensor, pages: Tensor, sums: Tensor,
    *, seed: int = 0, offset: int = 0, first: int = 0, ctas: int = 264,
) -> None:  # fmt: skip
    launch(spec, cache, sums, pages, sums, None, 2, 1, seed, offset, ctas, first)


def launch(
    spec: MoveSpec, cache: Tensor, buffer: Tensor, pages: Tensor, sums: Tensor | None, bad: Tensor | None,
    mode: int, check: int, seed: int, offset: int, ctas: int, first: int,
) -> None:  # fmt: skip
    words, flat = cache.view(torch.int32), buffer.view(torch.int32)
    src, dst = (flat, words) if mode in (1, 3) else (words, flat)
    units = len(pages) * spec.planes
    move_kernel[(min(ctas, units),)](
        src, dst, pages, flat if sums is None else sums, flat if bad is None else bad, units, words.stride(0),
        words.stride(1),
        offset // 4, seed, first, PLANES=spec.planes, ROW=row_units(spec, buffer), WORDS=spec.unit_nbytes // 4,
        BLOCK=check_block(spec.unit_nbytes), MODE=mode, SUM=check, num_warps=16,
    )  # fmt: skip


def row_units(spec: MoveSpec, buffer: Tensor) -> int:
    """From one page's bytes in the buffer to the next one's."""
    return buffer.stride(0) // spec.unit_nbytes if buffer.dim() == 3 else spec.planes
