"""Norm, quantization, SiLU, RoPE and greedy choice."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference.quant import quantize, to_e4m3
from kernels.specs import NormSpec, QuantSpec, RopeSpec, SiluSpec


def add_rmsnorm_quant(
    spec: NormSpec, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, scale: Tensor,
    *, ids: Tensor | None = None, token_scale: Tensor | None = None, channel_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:  # fmt: skip
    """`bias` `[hidden]`, where the spec is biased."""
    value = x[ids].float() if ids is not None else sum_parts(x, spec.parts)
    if spec.deferred and token_scale is not None and channel_scale is not None:
        value = value * channel_scale * token_scale[: value.shape[0], None]
    if spec.biased and bias is not None:
        value = value + bias.float()
    if residual is not None:
        residual.copy_(value if spec.embed else value + residual.float())
        value = residual.float()
    quantize(rms_norm(value, weight, eps), spec.quant, out, scale)


def rms_norm(value: Tensor, weight: Tensor, eps: float) -> Tensor:
    return value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def quant_fp8(spec: QuantSpec, x: Tensor, out: Tensor, scale: Tensor) -> None:
    quantize(x.float(), spec.quant, out, scale)


def silu_mul_quant(
    spec: SiluSpec,
    x: Tensor,
    out: Tensor,
    scale: Tensor,
    *,
    token_scale: Tensor | None = None,
    channel_scale: Tensor | None = None,
) -> None:
    value = x.float()
    if token_scale is not None and channel_scale is not None:
        value = value * token_scale[: x.shape[0], None] * channel_scale
    gate, up = value.chunk(2, -1)
    quantize(F.silu(gate) * up, spec.quant, out, scale)


def argmax(spec: QuantSpec, logits: Tensor, out: Tensor, workspace: Tensor) -> None:
    """The first of the largest; NaN is never the largest, and of nothing but NaN the first is taken."""
    logits = logits.float()
    out.copy_(logits.masked_fill(logits.isnan(), float("-inf")).argmax(-1))


def sum_parts(x: Tensor, parts: int) -> Tensor:
    """Split-K partial sums [parts, tokens, width] (the leading axis may be absent for one part), in order."""
    total = torch.zeros((), device=x.device)
    for part in x.float().view(parts, -1, x.shape[-1]):
        total = total + part
    return total


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Half-split rotary embedding of [tokens, heads, dim]; cos_sin is [max, dim]: cosines, then sines."""
    cos, sin = cos_sin[positions.long()][:, None].chunk(2, -1)
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rope_append(
    spec: RopeSpec, qkv: Tensor, positions: Tensor, slots: Tensor, cos_sin: Tensor, q: Tensor, k_cache: Tensor,
    v_cache: Tensor,
    *, k_scale: float = 1.0, v_scale: float = 1.0, token_scale: Tensor | None = None,
    channel_scale: Tensor | None = None, k_offset: Tensor | None = None, bias: Tensor | None = None,
    q_gain: Tensor | None = None, k_gain: Tensor | None = None, eps: float = 0.0, q_plain: Tensor | None = None,
    num_plain: Tensor | None = None,
) -> None:  # fmt: skip
    """`bias` `[width]` of qkv, where the spec is biased.

    Gains `[head_dim]` and `eps` where it is normed; `q_plain`, as q, and `num_plain` `[1]` int32 where it is rounded.
    """
    value = sum_parts(qkv, spec.parts)
    if token_scale is not None and channel_scale is not None:
        value = value * channel_scale * token_scale[: value.shape[0], None]
    if spec.biased and bias is not None:
        value = value + bias.float()
    heads = value.view(-1, spec.q_heads + 2 * spec.kv_heads, spec.head_dim)
    q_heads, k, v = heads.split((spec.q_heads, spec.kv_heads, spec.kv_heads), 1)
    if spec.normed and q_gain is not None and k_gain is not None:
        q_heads, k = rms_norm(q_heads, q_gain, eps), rms_norm(k, k_gain, eps)
    q_turned, k_turned = rotate(q_heads, positions, cos_sin), rotate(k, positions, cos_sin)
    if spec.smooth and k_offset is not None:
        matrix = hadamard(spec.head_dim).to(q.device)
        q_turned, k_turned = q_turned @ matrix, k_turned @ matrix - k_offset
    if spec.rounded and q_plain is not None and num_plain is not None:
        count = int(num_plain)
        q_plain[:count] = q_turned[:count]
        q[count:] = to_e4m3(q_turned[count:])
    else:
        q.copy_(q_turned.view_as(q))
    write_tokens(k_cache, slots, k_turned * (1.0 / k_scale))
    write_tokens(v_cache, slots, v * (1.0 / v_scale))


def hadamard(size: int) -> Tensor:
    """Sylvester's, for powers of two, divided by its norm: symmetric and its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


def write_tokens(cache: Tensor, slots: Tensor, x_THD: Tensor) -> None:
    """Put tokens into their slots (page * page_size + offset); slot -1 is a padded token."""
    live = slots >= 0
    page, offset = slots[live] // cache.shape[2], slots[live] % cache.shape[2]
    x = x_THD[live]
    value = to_e4m3(x) if cache.dtype == torch.float8_e4m3fn else x.to(cache.dtype)
    cache[page, :, offset] = value
