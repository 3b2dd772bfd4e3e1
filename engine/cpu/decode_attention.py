"""Paged attention of answers on the CPU: newest tokens, those of drafts, and what is computed again.

Flash-decoding (Dao et al. 2023): the context is read in parts of `DECODE_PART` tokens, which are joined by their
log-sum-exps. Shapes as in engine.cpu.attention; R tokens of a sequence.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from contracts.layout import KVGroup
from engine.cpu.head_shape import HeadShape
from engine.cpu.kv_cache import KVCache

DECODE_PART = 128
# The CPU flash kernel's per-thread buffers are 16-byte aligned only for a multiple of 4 query rows, and MKL rounds
# differently on unaligned data: with 3 rows the result depended on the thread, with 4 it never did, at the same cost.
_ROW_MULTIPLE = 4
_TRIED_ROWS = 276
"""The most query rows that are tried: 17 tokens of 16 heads that share a KV head have about as many."""
_TOGETHER = 64
"""Tokens of an answer that is computed again. Of more, the first would attend to more parts that they don't see."""

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class DecodeAttentionPlan:
    """The plan for tokens of answers: R of each sequence, several for a draft or an answer computed again.

    `pages` gathers `[planes, P, K, part, D]`, once for all tokens of a sequence; `part_rows` is None when each sequence
    has one part. Of the batch's rows `queries` `[B * R]` are those of the sequences, the last one again where one has
    fewer, and `outputs` says where each row is among these; None where R is 1. The query rows of a KV head are the
    heads of its group, token by token.
    """

    num_rows: int
    num_tokens: int
    pages: torch.Tensor
    mask_P1RT: torch.Tensor
    part_rows: torch.Tensor | None
    slots_BS: torch.Tensor | None
    absent_NS11: torch.Tensor | None
    queries: torch.Tensor | None = None
    outputs: torch.Tensor | None = None


def page_index(blocks: np.ndarray, group: KVGroup, num_blocks: int) -> torch.Tensor:
    """Blocks `[N, n]` -> rows of KVCache.pages, K and then V, in the order `[planes, N, K, n]`."""
    heads = blocks[:, None, :] * group.num_kv_heads + np.arange(group.num_kv_heads)[None, :, None]
    planes = np.arange(len(group.planes))[:, None, None, None] * (num_blocks * group.num_kv_heads)
    return torch.from_numpy((planes + heads).reshape(-1))


def most_tokens(group: int) -> int:
    """Return how many tokens of a sequence are attended together at most, with so many heads of a KV head.

    `computes_rows_alike` has tried their rows, and a part is read once for all of them.
    """
    return max(1, min(_TOGETHER, _TRIED_ROWS // group))


@cache
def computes_rows_alike(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether a query row's result does not depend on how many fours of rows there are.

    It is found by trying.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 2, n, head_dim, generator=generator).to(dtype) for n in (_TRIED_ROWS, DECODE_PART, DECODE_PART)
    )
    mask = torch.zeros(2, 1, 1, DECODE_PART)
    mask[1, :, :, 77:] = -torch.inf
    by_four = [flash(part.contiguous(), k, v, 0.0, False, attn_mask=mask) for part in q.split(_ROW_MULTIPLE, 2)]
    expected = [torch.cat(each, 2) for each in zip(*by_four, strict=True)]
    for count in (*range(2 * _ROW_MULTIPLE, 68, _ROW_MULTIPLE), *range(68, _TRIED_ROWS + 1, 52)):
        found = flash(q[:, :, :count].contiguous(), k, v, 0.0, False, attn_mask=mask)
        if not all(torch.equal(one, all_[:, :, :count]) for one, all_ in zip(found, expected, strict=True)):
            return False
    return True


def plan_decode(
    tables: np.ndarray, lengths: np.ndarray, counts: np.ndarray, group: int, cache: KVCache, window: int = 0
) -> DecodeAttentionPlan:
    """Return the plan of tokens of answers, whose rows follow each other.

    `tables` `[B, n]` block ids (anything valid past the end), `counts` `[B]` tokens of each, `lengths` `[B]` context
    tokens of the first of them, itself included. `window`: how many of them are seen, 0 for all; parts that lie before
    it are left out. `group`: query heads of a KV head.

    A token is to the bit what it is alone, where the kernel `computes_rows_alike`: parts that it does not see weigh 0.
    """
    pages_per_part = DECODE_PART // cache.group.block_size
    num_tokens = int(counts.max())
    lengths_BR = lengths[:, None] + np.minimum(np.arange(num_tokens), counts[:, None] - 1)
    seen_from_BR = np.maximum(lengths_BR - window, 0) if window else np.zeros_like(lengths_BR)
    first_parts = seen_from_BR[:, 0] // DECODE_PART
    num_parts = -(-lengths_BR[:, -1] // DECODE_PART) - first_parts
    rows = np.repeat(np.arange(len(lengths)), num_parts)
    parts = np.arange(len(rows)) - np.repeat(np.cumsum(num_parts) - num_parts - first_parts, num_parts)
    columns = parts[:, None] * pages_per_part + np.arange(pages_per_part)
    last_blocks = (lengths_BR[:, -1] - 1) // cache.group.block_size  # those behind have a former owner's content yet
    blocks = tables[rows[:, None], np.minimum(columns, last_blocks[rows, None])]
    positions = parts[:, None] * DECODE_PART + np.arange(DECODE_PART)
    is_seen_PRT = positions[:, None] >= seen_from_BR[rows][:, :, None]
    is_seen_PRT &= positions[:, None] < lengths_BR[rows][:, :, None]
    sees_PR: np.ndarray = np.any(is_seen_PRT, axis=2)
    mask_PRT = np.where(is_seen_PRT | ~sees_PR[:, :, None], np.float32(0), np.float32(-np.inf))
    joined = _plan_join(num_parts, sees_PR) if num_parts.max() > 1 else (None, None)
    queries, outputs = _plan_rows(counts) if num_tokens > 1 else (None, None)
    return DecodeAttentionPlan(
        num_rows=int(counts.sum()),
        num_tokens=num_tokens,
        pages=page_index(blocks, cache.group, cache.num_blocks),
        mask_P1RT=torch.from_numpy(mask_PRT if num_tokens == 1 else mask_PRT[:, _query_tokens(num_tokens, group)])[
            :, None
        ],
        part_rows=torch.from_numpy(rows) if num_parts.max() > 1 else None,
        slots_BS=joined[0],
        absent_NS11=joined[1],
        queries=queries,
        outputs=outputs,
    )


def _plan_join(num_parts: np.ndarray, sees_PR: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Which part is the s-th of a sequence (0 where there is none), and where a token has none."""
    columns = np.arange(num_parts.max())
    absent = columns >= num_parts[:, None]
    slots = np.where(absent, 0, (np.cumsum(num_parts) - num_parts)[:, None] + columns)
    absent_BSR = absent[:, :, None] | ~sees_PR[slots]
    absent_NS = np.ascontiguousarray(absent_BSR.swapaxes(1, 2)).reshape(-1, len(columns))
    return torch.from_numpy(slots), torch.from_numpy(absent_NS)[:, :, None, None]


def _plan_rows(counts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries and outputs of a DecodeAttentionPlan."""
    columns, firsts = np.arange(counts.max()), np.cumsum(counts) - counts
    queries = firsts[:, None] + np.minimum(columns, counts[:, None] - 1)
    outputs = np.flatnonzero(columns < counts[:, None])
    return torch.from_numpy(queries.reshape(-1)), torch.from_numpy(outputs)


def _query_tokens(num_tokens: int, group: int) -> np.ndarray:
    """Return the token of each query row of a KV head, padded as `attend_decodes` pads them."""
    padded = -(-num_tokens * group // _ROW_MULTIPLE) * _ROW_MULTIPLE
    return np.minimum(np.arange(padded) // group, num_tokens - 1)


def attend_decodes(
    q_BHD: torch.Tensor, pages: torch.Tensor, plan: DecodeAttentionPlan, heads: HeadShape, sinks_KG: torch.Tensor | None
) -> torch.Tensor:
    num_parts, kv_heads, dim = plan.mask_P1RT.shape[0], heads.num_kv_heads, heads.head_dim
    kv = pages.index_select(0, plan.pages).view(-1, num_parts, kv_heads, DECODE_PART, dim)
    q_BKRD = _by_sequence(q_BHD, plan, heads)
    num_rows = q_BKRD.shape[2]
    padded = -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
    q_PKRD = q_BKRD.new_zeros(num_parts, kv_heads, padded, dim)
    q_PKRD[:, :, :num_rows] = q_BKRD if plan.part_rows is None else q_BKRD.index_select(0, plan.part_rows)
    out, lse = flash(q_PKRD, kv[0], kv[-1], 0.0, False, attn_mask=plan.mask_P1RT, scale=heads.scale)
    out_PKRD, lse_PKR = out[:, :, :num_rows], lse[:, :, :num_rows]
    if plan.slots_BS is not None:
        out_NSKGD = _by_token(out_PKRD[plan.slots_BS], 3, heads.group)
        out_NKGD = _join(out_NSKGD, _by_token(lse_PKR[plan.slots_BS], 3, heads.group), plan, sinks_KG)
    else:
        out_NKGD = _by_token(out_PKRD, 2, heads.group)
        if sinks_KG is not None:
            out_NKGD = add_sink(out_NKGD, _by_token(lse_PKR, 2, heads.group), sinks_KG)
    rows = out_NKGD.reshape(len(out_NKGD), -1)
    return rows if plan.outputs is None else rows.index_select(0, plan.outputs)


def _by_token(x: torch.Tensor, dim: int, group: int) -> torch.Tensor:
    """`[B, ..., R * G, ...]` with the query rows in dimension `dim` -> `[B * R, ..., G, ...]`.

    What follows has the same shape for each token then: torch computes the last few elements of a row with another
    exponential than the others.
    """
    if x.shape[dim] == group:
        return x
    split = x.unflatten(dim, (-1, group))
    return split.movedim(dim, 1).flatten(0, 1)


def _by_sequence(q_BHD: torch.Tensor, plan: DecodeAttentionPlan, heads: HeadShape) -> torch.Tensor:
    """Return the query rows of each sequence and KV head, `[B, K, R * G, D]`."""
    if plan.queries is None:
        return q_BHD.view(-1, heads.num_kv_heads, heads.group, heads.head_dim)
    q_BRKGD = q_BHD.index_select(0, plan.queries).view(
        -1, plan.num_tokens, heads.num_kv_heads, heads.group, heads.head_dim
    )
    return q_BRKGD.transpose(1, 2).reshape(len(q_BRKGD), heads.num_kv_heads, -1, heads.head_dim)


def _join(
    out_NSKGD: torch.Tensor, lse_NSKG: torch.Tensor, plan: DecodeAttentionPlan, sinks_KG: torch.Tensor | None
) -> torch.Tensor:
    """Weigh each part by its share of the softmax's denominator. Absent parts weigh exactly 0."""
    assert plan.absent_NS11 is not None
    weights_NSKG = _shares(lse_NSKG.masked_fill(plan.absent_NS11, -torch.inf), sinks_KG)
    # Rounded as a lone part is, and as rows are that are computed beside prompts.
    return (out_NSKGD * weights_NSKG[..., None]).sum(1).to(out_NSKGD.dtype)


def add_sink(out_NKRD: torch.Tensor, lse_NKR: torch.Tensor, sinks_KR: torch.Tensor) -> torch.Tensor:
    """What the sink leaves of attention over one part."""
    return (out_NKRD * _shares(lse_NKR[:, None], sinks_KR)[:, 0, ..., None]).to(out_NKRD.dtype)


def _shares(lse_BSKR: torch.Tensor, sinks_KR: torch.Tensor | None) -> torch.Tensor:
    """Return the share of each part in the softmax's denominator, to which a sink adds its own.

    Not by a sigmoid: torch computes the last few elements of one with another exponential than the others.
    """
    if sinks_KR is None:
        return lse_BSKR.softmax(1)
    sinks_B1KR = sinks_KR.expand(len(lse_BSKR), 1, -1, -1)
    return torch.cat([lse_BSKR, sinks_B1KR], 1).softmax(1)[:, :-1]
