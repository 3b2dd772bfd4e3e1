"""Sampling with counter-based random numbers.

The same (seed, position) draws the same token on any machine.
"""

import torch
from torch import Tensor

from kernels.specs import SampleSpec

MASK = 0xFFFFFFFF
ROUND_A, ROUND_B, KEY_A, KEY_B = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85


def philox(seed: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return Philox4x32-10's words.

    With counter (low, high, 0, 0), as 64-bit integers `[..., 4]` (Salmon et al., SC 2011).
    """
    c0, c1 = low & MASK, high & MASK
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(10):
        b0, a0 = multiply(ROUND_B, c2)
        b1, a1 = multiply(ROUND_A, c0)
        c0, c1, c2, c3 = b0 ^ c1 ^ k0, a0, b1 ^ c3 ^ k1, a1
        k0, k1 = (k0 + KEY_A) & MASK, (k1 + KEY_B) & MASK
    return torch.stack((c0, c1, c2, c3), -1)


def multiply(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32-bit words of a 32 x 32 product, in 64-bit signed arithmetic."""
    low, high = x & 0xFFFF, x >> 16
    bottom = low * factor
    middle = high * factor + (bottom >> 16)
    return (middle >> 16) & MASK, ((middle << 16) | (bottom & 0xFFFF)) & MASK


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise from -2.8 to 22.9.

    Of a counter (token // 4, position) four tokens have a word each.

    -log(-log(1 - share)): the share is small where the noise is large, and float32 is fine there. Near 1 it is not: of
    numbers from 23 bits the noise ended at 16.6, and the largest of 24 was rounded to 1, whose noise is infinite.
    """
    counter = torch.arange(-(-vocab // 4), device=seeds.device)[None].expand(len(seeds), -1)
    words = philox(seeds.long()[:, None], counter, positions.long()[:, None].expand_as(counter))
    bits = words.flatten(1)[:, :vocab]
    share = ((MASK - bits).float() + 0.5) * 2.0**-32
    far = -torch.log(1 - share.clamp(max=1 - 2.0**-24))
    return -torch.log(torch.where(share < 2.0**-8, share + share * share / 2, far))


def sample(
    spec: SampleSpec, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor,
    positions: Tensor, tokens: Tensor, logprobs: Tensor, workspace: Tensor,
) -> None:  # fmt: skip
    raw = logits.float()
    scaled = raw / torch.where(temperature > 0, temperature, 1.0)[:, None]
    kept = keep(scaled, top_k, top_p, min_p)
    noisy = (scaled + gumbel(seeds, positions, spec.vocab)).masked_fill(~kept, float("-inf"))
    choice = torch.where(temperature > 0, noisy.argmax(-1), raw.argmax(-1))
    tokens.copy_(choice)
    logprobs.copy_(raw.log_softmax(-1).gather(1, choice[:, None]).squeeze(1))


def keep(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens stay: min-p and top-k, then top-p on what they leave.

    Tokens that tie with the last one stay too.
    """
    vocab = scaled.shape[-1]
    order = scaled.sort(-1, descending=True).values
    count = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long()
    by_min = order[:, :1] + torch.log(min_p.clamp(min=1e-30))[:, None]
    floor = torch.maximum(by_min, order.gather(1, count[:, None] - 1))
    shares = order.masked_fill(order < floor, float("-inf")).softmax(-1)
    before = shares.cumsum(-1) - shares
    within_p = (before < top_p[:, None]) | (top_p[:, None] >= 1)  # before the least likely the sum may be rounded to 1
    last = (within_p & (order >= floor)).sum(-1).clamp(min=1)
    return scaled >= torch.maximum(floor, order.gather(1, last[:, None] - 1))
