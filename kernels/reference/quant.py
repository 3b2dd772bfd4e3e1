"""Rounding to 8 and 4 bits, and back."""

import torch
from torch import Tensor

from kernels.layouts import codes_of_pairs

E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def to_e4m3(x: Tensor) -> Tensor:
    """Round to nearest even and saturate.

    The clamp is needed: torch 2.11 casts what lies beyond 464 to NaN.
    """
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def token_scale(x: Tensor) -> Tensor:
    """Per-row scale that maps the largest magnitude to 448."""
    return x.abs().amax(-1).clamp(min=1e-6) / E4M3_MAX


def quantize(y: Tensor, quant: str, out: Tensor, scale: Tensor) -> None:
    """Write y to out as e4m3, or in out's own type.

    "token" and "group" also write their scales, "group" as [groups of 128 columns, tokens].
    """
    if quant == "none":
        out.copy_(y.view_as(out))
    elif quant == "token":
        scale.copy_(token_scale(y))
        out.copy_(to_e4m3(y / scale[:, None]))
    elif quant == "tensor":
        out.copy_(to_e4m3(y / scale.reshape(-1)[0]).view_as(out))
    else:
        quantize_groups(y, 128, out, scale)


def quantize_groups(y: Tensor, group: int, out: Tensor, scale_GM: Tensor) -> None:
    """One scale per token and `group` columns; scales are stored [groups, tokens]."""
    grouped = y.view(y.shape[0], -1, group)
    scale_GM.copy_(token_scale(grouped).t())
    out.copy_(to_e4m3(grouped / scale_GM.t()[:, :, None]).view_as(out))


def dequantize_rows(w: Tensor, scale: Tensor) -> Tensor:
    return w.float() * scale.float()[:, None]


def dequantize_groups(w: Tensor, scale: Tensor, group: int = 32) -> Tensor:
    """A scale for each `group` columns of a row, the last ones of fewer."""
    return w.float() * scale.repeat_interleave(group, 1)[:, : w.shape[1]]


def dequantize_blocks(w: Tensor, scale: Tensor) -> Tensor:
    """128 x 128 block scales."""
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return w.float() * full[: w.shape[0], : w.shape[1]]


def e2m1_values(codes: Tensor) -> Tensor:
    """Codes 0..15 to their values (OCP MX specification, FP4 e2m1)."""
    magnitude = torch.tensor(E2M1_VALUES, device=codes.device)[codes & 7]
    return torch.where(codes > 7, -magnitude, magnitude)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """[..., n] bytes to [..., 2n] values, the low nibble first."""
    return e2m1_values(codes_of_pairs(packed).long())


def pack_e2m1(x: Tensor) -> Tensor:
    """Values to the nearest e2m1 code, two a byte; ties go to the even code, beyond 6 saturates."""
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=x.device)
    magnitude = x.abs().contiguous()
    low = torch.bucketize(magnitude, edges)  # ties to the lower code
    high = torch.bucketize(magnitude, edges, right=True)  # ties to the upper one
    code = torch.where((low != high) & (high % 2 == 0), high, low) | ((x < 0).long() << 3)
    return (code[..., ::2] | (code[..., 1::2] << 4)).to(torch.uint8)


def quantize_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in groups of 32.

    Packed e2m1 and a biased power-of-two exponent per group, floor(log2(amax)) - 2.
    """
    groups = w.float().view(w.shape[0], -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=2.0**-120))) - 2
    packed = pack_e2m1(groups / torch.exp2(exponent)[..., None]).view(w.shape[0], -1)
    return packed, (exponent + 127).clamp(0, 254).to(torch.uint8)


def mxfp4_values(codes: Tensor, exponent: Tensor) -> Tensor:
    """[n, k] codes 0..15, an exponent byte for 32 of them, to their values."""
    values = e2m1_values(codes.long()).unflatten(-1, (-1, 32))
    return (values * torch.exp2(exponent.float() - 127)[..., None]).flatten(-2)
