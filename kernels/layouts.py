"""Weight layouts: from what checkpoints hold to what the kernels read. Pure torch, done once at load."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Of the four codes of a word of tile_mxfp4, where sign, upper bit and the lower two bits lie. Three are as in a bf16,
# shifted by 0, 3 and 6; the fourth takes the bits that are left.
MX_BITS = ((15, 8, 6), (12, 5, 3), (9, 2, 0), (14, 13, 10))
MX_SHIFT = 63  # weights are widened times 2^-63, halfway between what overflows and what vanishes in a bf16

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of an AWQ word that holds each of eight columns


def tile_int4(codes: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """INT4 matrices in tiles of 64 x 128, each contiguous, as their products read them.

    codes: `[n, k]`, n in steps of 64 and k of 128; scale and zero `[n, groups]`, groups of 128 columns or multiples.
    Returns words int16 `[n / 64, k / 128, 64, 32]`: word c of a row has its columns c, 32 + c, 64 + c, 96 + c of the
    tile, the lowest bits first, and words come in the order in which a thread of the matrix unit wants them side by
    side: 0 1 8 9 16 17 24 25, 2 3 10 11 ... And factors int32 `[n / 64, ceil(k / 256), 64, 2]`, of two tiles along k:
    the float32 scale, its lowest four bits the zero. Scales of float16 and bfloat16 are kept as they are.
    """
    a, b, c, d = codes.to(torch.uint8).unflatten(-1, (-1, 4, 32)).unbind(-2)
    words = torch.stack([a | (b << 4), c | (d << 4)], -1).view(torch.int16)[..., 0]  # [n, k / 128, 32]
    words = words.unflatten(-1, (4, 4, 2)).transpose(-3, -2).flatten(-3)
    bits = (scale.float().contiguous().view(torch.int32) + 8) & -16
    factors = (bits | zero.to(torch.int32)).repeat_interleave(words.shape[1] // scale.shape[1], -1)
    return in_strips(words), in_strips(by_twos(factors))


def in_strips(rows: Tensor) -> Tensor:
    """`[..., n, tiles, x]` to `[..., n / 64, tiles, 64, x]`."""
    return rows.unflatten(-3, (-1, 64)).transpose(-3, -2).contiguous()


def out_of_strips(tiles: Tensor) -> Tensor:
    """The inverse of in_strips."""
    return tiles.transpose(-3, -2).flatten(-4, -3)


def by_twos(values: Tensor) -> Tensor:
    """`[..., tiles]` to `[..., ceil(tiles / 2), 2]`, a zero at the end of an odd row."""
    return F.pad(values, (0, values.shape[-1] % 2)).unflatten(-1, (-1, 2))


def untile_int4(words: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `tile_int4` was given: codes `[n, k]`, and scale and zero of each 128 columns, `[n, k / 128]`."""
    rows = out_of_strips(words).unflatten(-1, (4, 4, 2)).transpose(-3, -2).flatten(-3)
    codes = torch.stack([rows >> shift & 15 for shift in (0, 4, 8, 12)], -2).flatten(1)
    found = out_of_strips(factors).flatten(1)[:, : words.shape[1]]
    return codes.to(torch.uint8), (found & -16).view(torch.float32), (found & 15).to(torch.uint8)


def codes_of_pairs(packed: Tensor) -> Tensor:
    """[..., k / 2] bytes of neighbouring pairs, low nibble first (MXFP4 checkpoints), to [..., k] codes."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def tile_mxfp4(packed: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 matrices in tiles of 64 x 64, each contiguous, as the products of experts read them.

    packed: `[..., n, k / 2]` bytes of neighbouring pairs, the low nibble first; exponents `[..., n, k / 32]`, 127 more
    than they are; n and k in steps of 64. Returns words int16 `[..., n / 64, k / 64, 64, 16]`, word c of a row its
    columns c, 16 + c, 32 + c, 48 + c of the tile, with each code's bits where few shifts bring them into a bf16
    (kernels.triton.moe_mx); and scales int16 `[..., n / 64, ceil(k / 128), 64, 2]`: of two tiles along k both halves of
    32 columns, the lower byte first, as the upper bits of a bf16 that is 2^63 times the scale.
    """
    parts = codes_of_pairs(packed).to(torch.int32).unflatten(-1, (-1, 4, 16)).unbind(-2)
    placed = [
        (code >> 3 << sign) | ((code >> 2 & 1) << upper) | ((code & 3) << lower)
        for code, (sign, upper, lower) in zip(parts, MX_BITS, strict=True)
    ]
    words = sum(placed[1:], placed[0]).to(torch.int16)
    shifted = (exponents.to(torch.int32) + MX_SHIFT).clamp(0, 254).unflatten(-1, (-1, 2))
    pairs = (shifted[..., 0] | (shifted[..., 1] << 8)).to(torch.int16)
    return in_strips(words), in_strips(by_twos(pairs))


def untile_mxfp4(tiles: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """What `tile_mxfp4` was given, as codes `[..., n, k]` and exponents `[..., n, k / 32]`."""
    words = out_of_strips(tiles.to(torch.int32))  # [..., n, k / 64, 16]
    codes = torch.stack(
        [(words >> s & 1) << 3 | (words >> upper & 1) << 2 | words >> lower & 3 for s, upper, lower in MX_BITS], -2
    )
    pairs = out_of_strips(scales.to(torch.int32)).flatten(-2)[..., : words.shape[-2]]
    exponents = torch.stack([pairs & 255, pairs >> 8 & 255], -1).flatten(-2) - MX_SHIFT
    return codes.flatten(-3).to(torch.uint8), exponents.to(torch.uint8)


def pair_gate_up(rows: Tensor) -> Tensor:
    """Put eight gates and their eight ups in turn.

    From `[..., 2 * inter, x]` of all gates, then all ups: a thread that has one in its registers then has the other.
    """
    halves = rows.unflatten(-2, (2, -1, 8))
    return halves.transpose(-4, -3).flatten(-4, -2).contiguous()


def unpair_gate_up(rows: Tensor) -> Tensor:
    """The inverse of pair_gate_up."""
    return rows.unflatten(-2, (-1, 2, 8)).transpose(-4, -3).flatten(-4, -2).contiguous()


def gate_up_halves(rows: Tensor, dim: int = -2) -> Tensor:
    """gpt-oss stores gate and up rows in turn; the kernels want all gates, then all ups.

    dim: that of the rows.
    """
    gate, up = rows.unflatten(dim, (-1, 2)).unbind(dim)
    return torch.cat([gate, up], dim).contiguous()


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, zero_shift: int = 1, bits: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """GPTQ to (codes [n, k], scale [n, groups], zero [n, groups]).

    Of 4 bits tile_int4 packs them. qweight is int32 [k * bits / 32, n], integers along k, lowest first; qzeros int32
    [groups, n * bits / 32] stores the zeros less `zero_shift`: 1 in version 1 of the format, 0 in version 2. GPTQModel
    (utils/model.py) takes it from whole words, so that a zero of 0 borrows from the next: whole words get it back.
    """
    codes, ones = unpacked(qweight.t().contiguous(), bits), 0x1111_1111 if bits == 4 else 0x0101_0101
    zero = unpacked(qzeros.long() + zero_shift * ones, bits).t()
    return codes, scales.t().contiguous(), zero.contiguous()


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The lower 32 bits of [rows, w] to uint8 codes of 4 or 8 bits, [rows, w * 32 / bits].

    The lowest bits are the first code.
    """
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (1 << bits) - 1).flatten(1).to(torch.uint8)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """AWQ to the same: qweight is int32 [k, n / 8], eight columns a word in the order 0 2 4 6 1 3 5 7."""
    codes = nibbles(qweight, AWQ_ORDER).t()
    zero = nibbles(qzeros, AWQ_ORDER).t()
    return codes.to(torch.uint8), scales.t().contiguous(), zero.to(torch.uint8).contiguous()


def nibbles(words: Tensor, order: range | tuple[int, ...]) -> Tensor:
    """The lower 32 bits of [rows, w] to codes [rows, 8 w]."""
    shifts = torch.tensor([4 * i for i in order], device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 15).flatten(1)
