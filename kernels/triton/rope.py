# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""All between the qkv product and attention, in one launch.

Bias, norm of each head of q and k, RoPE, quantization of k and v, and their write into the paged cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.specs import RopeSpec
from kernels.triton.attn_decode import load_parts
from kernels.triton.common import PDL, pdl_launch, pdl_start, pdl_wait, to_e4m3


@triton.jit(do_not_specialize=["num_tokens"])
def rope_append_kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, pos_ptr, slot_ptr, cos_sin_ptr, token_scale_ptr, channel_scale_ptr,
    k_offset_ptr, bias_ptr, q_gain_ptr, k_gain_ptr, q_plain_ptr, num_plain_ptr, eps, k_inv, v_inv, stride_page,
    num_tokens,
    HQ: tl.constexpr, HKV: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    PARTS: tl.constexpr, DEFERRED: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr, SMOOTH: tl.constexpr,
    ROUNDED: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One CTA a token and BLOCK heads: a CTA a head costs 16 us at 256 tokens on H200, launch bound."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    W: tl.constexpr = HEADS * D
    H: tl.constexpr = D // 2
    h = tl.arange(0, H)
    live = (head < HEADS)[:, None] & (h >= 0)[None, :]
    is_q = (head < HQ)[:, None] & live
    is_k = ((head >= HQ) & (head < HQ + HKV))[:, None] & live
    is_v = (head >= HQ + HKV)[:, None] & live
    off = head[:, None] * D + h[None, :]
    pdl_start(PDL)
    pos = tl.load(pos_ptr + token)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + pos * D + h)[None, :]
    sin = tl.load(cos_sin_ptr + pos * D + H + h)[None, :]
    if BIASED:
        bias1 = tl.load(bias_ptr + off, mask=live, other=0.0).to(tl.float32)
        bias2 = tl.load(bias_ptr + off + H, mask=live, other=0.0).to(tl.float32)
    if NORMED:
        gain1, gain2 = gains(q_gain_ptr, k_gain_ptr, h, is_q), gains(q_gain_ptr, k_gain_ptr, H + h, is_q)
    if ROUNDED:
        num_plain = tl.load(num_plain_ptr)
    pdl_wait(PDL)
    x1 = load_parts(qkv_ptr, token * W + off, live, num_tokens, W, PARTS)
    x2 = load_parts(qkv_ptr, token * W + off + H, live, num_tokens, W, PARTS)
    if DEFERRED:
        factor = tl.load(token_scale_ptr + token)
        x1 = x1 * factor * tl.load(channel_scale_ptr + off, mask=live, other=0.0)
        x2 = x2 * factor * tl.load(channel_scale_ptr + off + H, mask=live, other=0.0)
    if BIASED:
        x1 += bias1
        x2 += bias2
    n1, n2 = x1, x2
    if NORMED:
        r = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / D + eps)[:, None]
        n1 = x1 * r * gain1
        n2 = x2 * r * gain2
    y1 = n1 * cos - n2 * sin
    y2 = n2 * cos + n1 * sin
    if SMOOTH:  # a Hadamard matrix is [[S, S], [S, -S]] of the one of half its size
        S = signs(H) * D**-0.5
        y1, y2 = tl.dot(y1 + y2, S), tl.dot(y1 - y2, S)
        k_offset_at = k_offset_ptr + (head - HQ)[:, None] * D + h[None, :]
        y1 -= tl.load(k_offset_at, mask=is_k, other=0.0)
        y2 -= tl.load(k_offset_at + H, mask=is_k, other=0.0)
    q_off = token * HQ * D + off
    if ROUNDED:
        store_halves(q_plain_ptr + q_off, y1, y2, H, is_q & (token < num_plain))
        store_halves(q_ptr + q_off, to_e4m3(y1), to_e4m3(y2), H, is_q & (token >= num_plain))
    else:
        store_halves(q_ptr + q_off, y1, y2, H, is_q)
    base = slot // PAGE * stride_page + slot % PAGE * D
    k_at = k_ptr + base + (head - HQ)[:, None] * PAGE * D + h[None, :]
    v_at = v_ptr + base + (head - HQ - HKV)[:, None] * PAGE * D + h[None, :]
    k1, k2, v1, v2 = y1 * k_inv, y2 * k_inv, x1 * v_inv, x2 * v_inv
    if FP8:
        k1, k2, v1, v2 = to_e4m3(k1), to_e4m3(k2), to_e4m3(v1), to_e4m3(v2)
    ok = slot >= 0  # a padded token has slot -1 and writes nothing
    store_halves(k_at, k1, k2, H, is_k & ok)
    store_halves(v_at, v1, v2, H, is_v & ok)


@triton.jit
def store_halves(at, first, second, H: tl.constexpr, mask):
    """Store both halves of heads, H columns each."""
    tl.store(at, first.to(at.dtype.element_ty), mask=mask)
    tl.store(at + H, second.to(at.dtype.element_ty), mask=mask)


@triton.jit
def gains(q_gain_ptr, k_gain_ptr, h, is_q):
    """Return the norm's gains, [heads, columns h]; v's are not used."""
    q_gain = tl.load(q_gain_ptr + h).to(tl.float32)[None, :]
    k_gain = tl.load(k_gain_ptr + h).to(tl.float32)[None, :]
    return tl.where(is_q, q_gain, k_gain)


@triton.jit
def signs(N: tl.constexpr):
    """Return the signs of Sylvester's matrix [N, N], N up to 256.

    Minus where the numbers of row and column share an odd count of bits.
    """
    n = tl.arange(0, N)
    shared = n[:, None] & n[None, :]
    shared ^= shared >> 4
    shared ^= shared >> 2
    shared ^= shared >> 1
    return (1 - 2 * (shared & 1)).to(tl.float32)


def rope_append(
    spec: RopeSpec, qkv: Tensor, positions: Tensor, slots: Tensor, cos_sin: Tensor, q: Tensor, k_cache: Tensor,
    v_cache: Tensor,
    *, k_scale: float = 1.0, v_scale: float = 1.0, token_scale: Tensor | None = None,
    channel_scale: Tensor | None = None, k_offset: Tensor | None = None, bias: Tensor | None = None,
    q_gain: Tensor | None = None, k_gain: Tensor | None = None, eps: float = 0.0, q_plain: Tensor | None = None,
    num_plain: Tensor | None = None, pdl: bool = PDL,
) -> None:  # fmt: skip
    tokens, heads = positions.shape[0], spec.q_heads + 2 * spec.kv_heads
    rope_append_kernel[(tokens, triton.cdiv(heads, 16))](
        qkv, q, k_cache, v_cache, positions, slots, cos_sin, cos_sin if token_scale is None else token_scale,
        cos_sin if channel_scale is None else channel_scale, cos_sin if k_offset is None else k_offset,
        cos_sin if bias is None else bias, cos_sin if q_gain is None else q_gain, cos_sin if k_gain is None else k_gain,
        q if q_plain is None else q_plain, positions if num_plain is None else num_plain, eps,
        1.0 / k_scale, 1.0 / v_scale, k_cache.stride(0), tokens,
        HQ=spec.q_heads, HKV=spec.kv_heads, HEADS=heads, BLOCK=16, D=spec.head_dim, PAGE=spec.page, PARTS=spec.parts,
        DEFERRED=spec.deferred, BIASED=spec.biased, NORMED=spec.normed, SMOOTH=spec.smooth,
        ROUNDED=spec.rounded, FP8=spec.kv == "e4m3", PDL=pdl, num_warps=4, **pdl_launch(pdl),
    )  # fmt: skip
