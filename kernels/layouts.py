"""Weight layouts: from what checkpoints hold to what the kernels read. Pure torch, done once at load."""

import torch
from torch import Tensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of an AWQ word that holds each of eight columns


def block_of(weight_format: str) -> int:
    """Columns of a block of the split layout: 128 shares one INT4 scale; each half of 64 has its own MXFP4 scale."""
    return 64 if weight_format == "mxfp4" else 128


def split_nibbles(codes_NK: Tensor, block: int = 128) -> Tensor:
    """[..., k] codes 0..15 to [..., k / 2] bytes: in each block along k low nibbles hold the first half.

    A kernel then takes both halves of a block from one load without interleaving registers.
    """
    halves = codes_NK.to(torch.uint8).unflatten(-1, (-1, 2, block // 2))
    return (halves[..., 0, :] | (halves[..., 1, :] << 4)).flatten(-2).contiguous()


def join_nibbles(packed: Tensor, block: int = 128) -> Tensor:
    """The inverse of split_nibbles."""
    blocks = packed.unflatten(-1, (-1, 1, block // 2))
    return torch.cat([blocks & 15, blocks >> 4], -2).flatten(-3)


def pairs_to_split(packed: Tensor) -> Tensor:
    """[..., k / 2] bytes of neighbouring pairs, low nibble first (MXFP4 checkpoints), to the split layout."""
    return split_nibbles(torch.stack([packed & 15, packed >> 4], -1).flatten(-2), block_of("mxfp4"))


def gate_up_halves(rows: Tensor, dim: int = -2) -> Tensor:
    """gpt-oss stores gate and up rows in turn; the kernels want all gates, then all ups. dim: that of the rows."""
    gate, up = rows.unflatten(dim, (-1, 2)).unbind(dim)
    return torch.cat([gate, up], dim).contiguous()


def from_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, zero_shift: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """GPTQ to (codes [n, k] 0..15, scale [n, groups], zero [n, groups]); split_nibbles packs the codes.

    qweight is int32 [k / 8, n], eight nibbles along k, lowest first; qzeros int32 [groups, n / 8] stores the zeros less
    `zero_shift`: 1 in version 1 of the format, 0 in version 2. GPTQModel (utils/model.py) takes it from whole words, so
    that a zero of 0 borrows from the next: whole words get it back.
    """
    codes = nibbles(qweight.t().contiguous(), range(8))
    zero = nibbles(qzeros.long() + zero_shift * 0x1111_1111, range(8)).t()
    return codes.to(torch.uint8), scales.t().contiguous(), zero.to(torch.uint8).contiguous()


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """AWQ to the same: qweight is int32 [k, n / 8], eight columns a word in the order 0 2 4 6 1 3 5 7."""
    codes = nibbles(qweight, AWQ_ORDER).t()
    zero = nibbles(qzeros, AWQ_ORDER).t()
    return codes.to(torch.uint8), scales.t().contiguous(), zero.to(torch.uint8).contiguous()


def nibbles(words: Tensor, order: range | tuple[int, ...]) -> Tensor:
    """The lower 32 bits of [rows, w] to codes [rows, 8 w]."""
    shifts = torch.tensor([4 * i for i in order], device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 15).flatten(1)
