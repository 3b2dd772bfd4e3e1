"""KV pages to a contiguous buffer and back, with the checksum of each unit."""

import torch
from torch import Tensor

from kernels.reference.quant import to_e4m3
from kernels.specs import MoveSpec

WORD, FACTOR, STRIDE = 0xFFFFFFFF, 16777619, 40503


def kv_pack(
    spec: MoveSpec, cache: Tensor, pages: Tensor, buffer: Tensor, sums: Tensor | None,
    *, seed: int = 0, offset: int = 0, inv_scales: Tensor | None = None, ctas: int = 0,
) -> None:  # fmt: skip
    units = cache[:, pages.long(), offset : offset + spec.unit_nbytes].transpose(0, 1)
    packed = narrowed(units, inv_scales) if spec.convert else units
    buffer.view(len(pages), spec.planes, spec.unit_nbytes).copy_(packed)
    if spec.checksum and sums is not None:
        sums.copy_(checksums(spec, packed.contiguous(), len(pages), seed))


def narrowed(units: Tensor, inv_scales: Tensor | None) -> Tensor:
    """`inv_scales` `[planes]`: what each plane's values are multiplied by before they are rounded."""
    assert inv_scales is not None, "values are rounded by a scale for each plane"
    return to_e4m3(units.float() * inv_scales[None, :, None]).view(torch.uint8)


def kv_unpack(
    spec: MoveSpec, buffer: Tensor, cache: Tensor, pages: Tensor, sums: Tensor | None, bad: Tensor,
    *, seed: int = 0, offset: int = 0, ctas: int = 0,
) -> None:  # fmt: skip
    units = buffer.view(len(pages), spec.planes, spec.unit_nbytes).transpose(0, 1)
    cache[:, pages.long(), offset : offset + spec.unit_nbytes] = units
    if spec.checksum and sums is not None:
        found = checksums(spec, units.transpose(0, 1).contiguous(), len(pages), seed)
        if not torch.equal(sums, found):
            bad.fill_(1)


def kv_sums(
    spec: MoveSpec, cache: Tensor, pages: Tensor, sums: Tensor,
    *, seed: int = 0, offset: int = 0, first: int = 0, ctas: int = 0,
) -> None:  # fmt: skip
    """`first`: the column of each unit's first word, where units are parts of a larger row."""
    units = cache[:, pages.long(), offset : offset + spec.unit_nbytes].transpose(0, 1).contiguous()
    sums.copy_(checksums(spec, units, len(pages), seed, first))


def checksums(spec: MoveSpec, buffer: Tensor, num_pages: int, seed: int, first: int = 0) -> Tensor:
    """Return a checksum of each unit.

    A polynomial over the 32-bit words of each unit with odd factors, xor the seed and the unit's number.

    Words are taken in columns of check_block(): h = sum_i (2i + 1) * sum_j word[j, i] * FACTOR^(last - j), modulo 2^32.
    Every factor is odd, so one changed word always shows; the seed carries the epoch of the transfer. Columns count
    from `first` on.
    """
    block = check_block(spec.unit_nbytes)
    words = buffer.view(torch.int32).view(num_pages * spec.planes, -1, block).long() & WORD
    column = torch.zeros_like(words[:, 0])
    for row in words.unbind(1):
        column = (column * FACTOR + row) & WORD
    odd = 2 * (first + torch.arange(block, device=buffer.device)) + 1
    units = torch.arange(len(words), device=buffer.device)
    total = ((column * odd) & WORD).sum(-1) & WORD
    signed = (total ^ ((seed + units * STRIDE) & WORD)) & WORD
    return torch.where(signed > 0x7FFFFFFF, signed - 0x100000000, signed).to(torch.int32)


def check_block(unit_nbytes: int) -> int:
    """Words in a column step: the largest power of two up to 8192 that divides the unit."""
    words = unit_nbytes // 4
    return min(8192, words & -words)
