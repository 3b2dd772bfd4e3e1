"""Paged attention by gathering the pages and a softmax in fp32."""

import torch
from torch import Tensor

from kernels.reference.elementwise import rope_append
from kernels.reference.quant import quantize, quantize_groups
from kernels.specs import AttnSpec, FusedAttnSpec, MLASpec, RopeSpec


def gather(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a sequence as [heads, length, dim], fp32."""
    count = -(-length // cache.shape[2])
    return cache[pages[:count].long()].float().transpose(0, 1).flatten(1, 2)[:, :length]


def attend(
    q_THD: Tensor, k_HND: Tensor, v_HND: Tensor, scale: float, window: int, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last T tokens of a sequence of N.

    Also the log-sum-exp of each row, sink included.
    """
    tokens, heads, _ = q_THD.shape
    length = k_HND.shape[1]
    k, v = (t.repeat_interleave(heads // t.shape[0], 0) for t in (k_HND, v_HND))
    score = torch.einsum("thd,hnd->htn", q_THD.float(), k) * scale
    n, limit = (
        torch.arange(length, device=score.device),
        torch.arange(length - tokens, length, device=score.device)[:, None],
    )
    hidden = (n > limit) | ((n <= limit - window) if window else torch.zeros_like(n, dtype=torch.bool))
    score = score.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        score = torch.cat([score, sinks.float()[:, None, None].expand(-1, tokens, 1)], -1)
    lse = score.logsumexp(-1)
    weight = torch.exp(score - lse[..., None])[..., :length]
    return torch.einsum("htn,hnd->thd", weight, v), lse.t()


def attn_decode(
    spec: AttnSpec, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor,
    workspace: Tensor, *, sm_scale: float, k_scale: float = 1.0, v_scale: float = 1.0, sinks: Tensor | None = None,
    lse: Tensor | None = None, starts: Tensor | None = None, max_len: int = 0,
) -> None:  # fmt: skip
    """Attend with the last query tokens of each sequence.

    `starts` `[B]`: the first key that a row sees, where `q_len` is 1 and there is no window.
    """
    q_BTHD = q.view(-1, spec.q_len, spec.q_heads, spec.head_dim)
    out_BTHD, lse_BTH = out.view_as(q_BTHD), None if lse is None else lse.view(-1, spec.q_len, spec.q_heads)
    firsts = [0] * len(seq_lens) if starts is None else starts.tolist()
    for b, (first, length) in enumerate(zip(firsts, seq_lens.tolist(), strict=True)):
        k, v = (gather(c, block_table[b], length)[:, first:] for c in (k_cache, v_cache))
        y, row_lse = attend(q_BTHD[b], k, v, sm_scale * k_scale, spec.window, sinks)
        out_BTHD[b] = (y * v_scale).to(out.dtype)
        if lse_BTH is not None:
            lse_BTH[b] = row_lse


def attn_decode_fused(
    spec: FusedAttnSpec, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    cos_sin: Tensor, out: Tensor, out_scale: Tensor, workspace: Tensor,
    *, sm_scale: float, k_scale: float = 1.0, v_scale: float = 1.0, token_scale: Tensor | None = None,
    channel_scale: Tensor | None = None, bias: Tensor | None = None, q_gain: Tensor | None = None,
    k_gain: Tensor | None = None, eps: float = 0.0, behind: Tensor | None = None, max_len: int = 0,
) -> None:  # fmt: skip
    batch, heads, dim = seq_lens.shape[0], spec.q_heads, spec.head_dim
    position = seq_lens.long() - 1
    slots = block_table.gather(1, (position // spec.page)[:, None]).squeeze(1).long() * spec.page + position % spec.page
    q = torch.empty(batch, heads, dim, device=qkv.device)
    rope = RopeSpec(
        heads, spec.kv_heads, dim, spec.page, parts=spec.parts, deferred=spec.deferred, biased=spec.biased,
        normed=spec.normed,
    )  # fmt: skip
    rope_append(
        rope, qkv, position, slots, cos_sin, q, k_cache, v_cache, k_scale=k_scale, v_scale=v_scale,
        token_scale=token_scale, channel_scale=channel_scale, bias=bias, q_gain=q_gain, k_gain=k_gain, eps=eps,
    )  # fmt: skip
    y = torch.empty(batch, heads, dim, device=qkv.device)
    plain = AttnSpec(heads, spec.kv_heads, dim, spec.page)
    attn_decode(
        plain,
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        y,
        workspace,
        sm_scale=sm_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if spec.quant == "group":
        quantize_groups(y.view(batch, -1), dim, out.view(batch, -1), out_scale)
    else:
        quantize(y.view(batch, -1), spec.quant, out.view(batch, -1), out_scale)


def attn_prefill(
    spec: AttnSpec, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    q_starts: Tensor,
    kv_starts: Tensor, out: Tensor, workspace: Tensor, *, max_q: int, max_kv: int, sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0, sinks: Tensor | None = None, lse: Tensor | None = None, prepared: None = None,
) -> None:  # fmt: skip
    starts = q_starts.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        k, v = (gather(c, block_table[b], length) for c in (k_cache, v_cache))
        y, row_lse = attend(q[rows], k, v, sm_scale * k_scale, spec.window, sinks)
        out[rows] = (y * v_scale).to(out.dtype)
        if lse is not None:
            lse[rows] = row_lse


def mla_attention(
    spec: MLASpec, q: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, q_starts: Tensor, out: Tensor,
    *, max_q: int, sm_scale: float, scale: float = 1.0,
) -> None:  # fmt: skip
    starts = q_starts.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        latent = gather(cache[:, None], block_table[b], length)
        y, _ = attend(q[rows], latent, latent[..., : spec.latent], sm_scale * scale, 0, None)
        out[rows] = (y * scale).to(out.dtype)
