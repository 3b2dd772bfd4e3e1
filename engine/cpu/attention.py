"""Paged attention on the CPU in plain torch, planned once a step and run in every layer.

Every call to the kernel has a shape that depends on one sequence alone, so a row's result does not depend, to the
bit, on what else is in the batch or on how a prompt was cut: decode reads the context in parts of `DECODE_PART`
tokens and joins them by their log-sum-exps (flash-decoding, Dao et al. 2023); prefill works on tiles of the prompt
that start at multiples of the tile's size, all tiles with one context length in one call.

Shapes: M rows of the batch, H heads, K KV heads, G = H / K query heads per KV head, D head size, P parts, Q tokens
of a tile.
"""

from dataclasses import dataclass

import numpy as np
import torch

from contracts.layout import KVGroup
from engine.cpu.kv_cache import KVCache
from kernels.cpu.isa import has_amx

DECODE_PART = 128
# The CPU flash kernel's per-thread buffers are 16-byte aligned only for a multiple of 4 query rows, and MKL rounds
# differently on unaligned data: with 3 rows the result depended on the thread, with 4 it never did, at the same cost.
_ROW_MULTIPLE = 4
# From 192 query rows on, the kernel splits them by 64 and not by 32: 124 against 30 GFLOP/s on 2 Zen 4 cores.
_MIN_TILE_ROWS = 384

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class HeadShape:
    """`window`: how many of the newest tokens a token sees in the layers that have one, itself included.

    `segment`: or those since the last multiple of it. `is_biased`: q and k have biases, and so scores that bfloat16
    does not tell apart: Qwen2-7B's text is worse by an eighth with such (perplexity 8.0 for 7.1,
    huggingface/transformers#33317).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    segment: int = 0
    is_biased: bool = False

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def tile(self) -> int:
        """Tokens of a prefill tile: a multiple of 64 with at least `_MIN_TILE_ROWS` query rows."""
        return -(-_MIN_TILE_ROWS // self.group // 64) * 64


@dataclass(frozen=True)
class DecodeAttentionPlan:
    """One query token a sequence.

    `pages` gathers `[2, P, K, part, D]`; `part_rows` is None when each sequence has one part.
    """

    num_rows: int
    pages: torch.Tensor
    mask_P11T: torch.Tensor
    part_rows: torch.Tensor | None
    slots_BS: torch.Tensor | None
    absent_BS11: torch.Tensor | None


@dataclass(frozen=True)
class TileBucket:
    """The tiles of one context length.

    `num_tiles` of them, the last of whose `mask_RT` columns are the tile's own.
    """

    num_tiles: int
    pages: torch.Tensor
    mask_RT: torch.Tensor


@dataclass(frozen=True)
class TilePlan:
    """Consecutive rows of the batch as tiles, in the order of the buckets.

    `queries` says for each row of the tiles which of the batch's `[M * K]` rows of G * D it is (any where the tile has
    room to spare), `outputs` for each of these rows of the batch where it is in the tiles.

    `is_answer`: recomputed tokens of an answer, which take the kernel that decode takes.
    """

    is_answer: bool
    buckets: tuple[TileBucket, ...]
    queries: torch.Tensor
    outputs: torch.Tensor


@dataclass(frozen=True)
class AttentionPlan:
    decode: DecodeAttentionPlan | None
    tiles: tuple[TilePlan, ...]


def page_index(blocks: np.ndarray, group: KVGroup, num_blocks: int) -> torch.Tensor:
    """Blocks `[N, n]` -> rows of KVCache.pages for K and then V, in the order `[2, N, K, n]`."""
    heads = blocks[:, None, :] * group.num_kv_heads + np.arange(group.num_kv_heads)[None, :, None]
    return torch.from_numpy(np.stack([heads, heads + num_blocks * group.num_kv_heads]).reshape(-1))


def plan_decode(tables: np.ndarray, lengths: np.ndarray, cache: KVCache, window: int = 0) -> DecodeAttentionPlan:
    """Return the plan of one query token a sequence.

    `tables` `[B, n]` block ids (anything valid past the end), `lengths` `[B]` context tokens, the newest included.
    `window`: how many of them are seen, 0 for all; parts that lie before it are left out.
    """
    pages_per_part = DECODE_PART // cache.group.block_size
    seen_from = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
    first_parts = seen_from // DECODE_PART
    num_parts = -(-lengths // DECODE_PART) - first_parts
    rows = np.repeat(np.arange(len(lengths)), num_parts)
    parts = np.arange(len(rows)) - np.repeat(np.cumsum(num_parts) - num_parts - first_parts, num_parts)
    columns = parts[:, None] * pages_per_part + np.arange(pages_per_part)
    blocks = tables[rows[:, None], np.minimum(columns, tables.shape[1] - 1)]
    positions = parts[:, None] * DECODE_PART + np.arange(DECODE_PART)
    is_seen = (positions >= seen_from[rows, None]) & (positions < lengths[rows, None])
    mask = np.where(is_seen, np.float32(0), np.float32(-np.inf))
    joined = _plan_join(num_parts) if num_parts.max() > 1 else (None, None)
    return DecodeAttentionPlan(
        num_rows=len(lengths),
        pages=page_index(blocks, cache.group, cache.num_blocks),
        mask_P11T=torch.from_numpy(mask)[:, None, None],
        part_rows=torch.from_numpy(rows) if num_parts.max() > 1 else None,
        slots_BS=joined[0],
        absent_BS11=joined[1],
    )


def _plan_join(num_parts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Which part is the s-th of a sequence (0 where there is none), and where there is none."""
    columns = np.arange(num_parts.max())
    absent = columns >= num_parts[:, None]
    slots = np.where(absent, 0, (np.cumsum(num_parts) - num_parts)[:, None] + columns)
    return torch.from_numpy(slots), torch.from_numpy(absent)[:, :, None, None]


@dataclass(frozen=True)
class TiledChunks:
    """Several chunks of tokens `[starts, starts + counts)`.

    Their rows follow each other in the batch from `first_row` on.
    """

    tables: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    first_row: int
    is_answer: bool


def plan_tiles(chunks: TiledChunks, heads: HeadShape, cache: KVCache, window: int = 0) -> TilePlan:
    """`window` as for plan_decode."""
    size, starts, ends = heads.tile, chunks.starts, chunks.starts + chunks.counts
    low, high = starts // size, -(-ends // size)
    owners = np.repeat(np.arange(len(starts)), high - low)
    tiles = np.arange(len(owners)) - np.repeat(np.cumsum(high - low) - high, high - low)
    order = tiles.argsort(kind="stable")
    owners, tiles = owners[order], tiles[order]
    rows, count = _tile_rows(chunks, owners, tiles, size), int(chunks.counts.sum())
    queries, outputs = _row_index(rows, count, heads.num_kv_heads)
    return TilePlan(
        is_answer=chunks.is_answer,
        buckets=tuple(
            _plan_bucket(chunks, owners[tiles == tile], int(tile), heads, cache, window) for tile in np.unique(tiles)
        ),
        queries=torch.from_numpy(queries + chunks.first_row * heads.num_kv_heads),
        outputs=torch.from_numpy(outputs),
    )


def _tile_rows(chunks: TiledChunks, owners: np.ndarray, tiles: np.ndarray, size: int) -> np.ndarray:
    """`[N, Q]`: the row of each token of each tile among those of the chunks, or -1 for one of no chunk."""
    starts, counts = chunks.starts, chunks.counts
    positions = tiles[:, None] * size + np.arange(size)
    inside = (positions >= starts[owners, None]) & (positions < (starts + counts)[owners, None])
    first_rows = np.cumsum(counts) - counts
    return np.where(inside, positions - starts[owners, None] + first_rows[owners, None], -1)


def _row_index(rows_NQ: np.ndarray, num_rows: int, num_kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """From `[num_rows, K]` to `[N, K, Q]` and back, both flat."""
    heads = np.arange(num_kv_heads)[None, :, None]
    queries = (np.maximum(rows_NQ, 0)[:, None, :] * num_kv_heads + heads).reshape(-1)
    is_used = np.broadcast_to(rows_NQ[:, None, :] >= 0, (len(rows_NQ), num_kv_heads, rows_NQ.shape[1])).reshape(-1)
    outputs = np.empty(num_rows * num_kv_heads, np.int64)
    outputs[queries[is_used]] = np.flatnonzero(is_used)
    return queries, outputs


def _plan_bucket(
    chunks: TiledChunks, owners: np.ndarray, tile: int, heads: HeadShape, cache: KVCache, window: int
) -> TileBucket:
    first = max(tile * heads.tile - window + 1, 0) // 64 * 64 if window else 0
    columns = np.arange(first // cache.group.block_size, (tile + 1) * heads.tile // cache.group.block_size)
    blocks = chunks.tables[owners[:, None], np.minimum(columns, chunks.tables.shape[1] - 1)]
    return TileBucket(
        num_tiles=len(owners),
        pages=page_index(blocks, cache.group, cache.num_blocks),
        mask_RT=_causal_mask(tile, heads, first, window).to(cache.dtype),
    )


def _causal_mask(tile: int, heads: HeadShape, first: int, window: int) -> torch.Tensor:
    """Return the mask of the rows of a tile over the context from token `first` on."""
    positions = tile * heads.tile + torch.arange(heads.tile).repeat_interleave(heads.group)[:, None]
    context = torch.arange(first, (tile + 1) * heads.tile)
    is_hidden = context > positions
    if window:
        is_hidden |= context <= positions - window
    return torch.zeros(is_hidden.shape).masked_fill_(is_hidden, -torch.inf)


def attend(
    q_MHD: torch.Tensor,
    pages: torch.Tensor,
    plan: AttentionPlan,
    heads: HeadShape,
    sinks_KG: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every row, of which there may be none, over its own sequence, `[M, H * D]`.

    `pages` is KVCache.pages of the layer; `sinks_KG` are logits of a token that each head sees and that gives nothing.
    """
    if not len(q_MHD):
        return q_MHD.flatten(1)
    parts = []
    if plan.decode:
        parts.append(_decode(q_MHD[: plan.decode.num_rows], pages, plan.decode, heads, sinks_KG))
    q_flat = q_MHD.reshape(len(q_MHD) * heads.num_kv_heads, -1)
    parts += [_tiles(q_flat, pages, tiles, heads, sinks_KG) for tiles in plan.tiles]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(
    q_BHD: torch.Tensor, pages: torch.Tensor, plan: DecodeAttentionPlan, heads: HeadShape, sinks_KG: torch.Tensor | None
) -> torch.Tensor:
    group, dim = heads.group, heads.head_dim
    num_parts = plan.mask_P11T.shape[0]
    kv = pages.index_select(0, plan.pages).view(2, num_parts, heads.num_kv_heads, DECODE_PART, dim)
    q_PHD = q_BHD if plan.part_rows is None else q_BHD.index_select(0, plan.part_rows)
    padded = -(-group // _ROW_MULTIPLE) * _ROW_MULTIPLE
    q_PKRD = q_PHD.new_zeros(num_parts, heads.num_kv_heads, padded, dim)
    q_PKRD[:, :, :group] = q_PHD.view(num_parts, heads.num_kv_heads, group, dim)
    out, lse = _flash(q_PKRD, kv[0], kv[1], 0.0, False, attn_mask=plan.mask_P11T, scale=heads.scale)
    out_PKGD, lse_PKG = out[:, :, :group], lse[:, :, :group]
    if plan.slots_BS is not None:
        out_PKGD = _join(out_PKGD, lse_PKG, plan, sinks_KG)
    elif sinks_KG is not None:
        out_PKGD = _sink(out_PKGD, lse_PKG, sinks_KG)
    return out_PKGD.reshape(plan.num_rows, -1)


def _join(
    out_PKGD: torch.Tensor, lse_PKG: torch.Tensor, plan: DecodeAttentionPlan, sinks_KG: torch.Tensor | None
) -> torch.Tensor:
    """Weigh each part by its share of the softmax's denominator. Absent parts weigh exactly 0."""
    assert plan.slots_BS is not None and plan.absent_BS11 is not None
    lse_BSKG = lse_PKG[plan.slots_BS].masked_fill(plan.absent_BS11, -torch.inf)
    weights_BSKG = _shares(lse_BSKG, sinks_KG)
    # Rounded as a lone part is, and as rows are that are computed beside prompts.
    return (out_PKGD[plan.slots_BS] * weights_BSKG[..., None]).sum(1).to(out_PKGD.dtype)


def _sink(out_NKRD: torch.Tensor, lse_NKR: torch.Tensor, sinks_KR: torch.Tensor) -> torch.Tensor:
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


def _tiles(
    q_flat: torch.Tensor, pages: torch.Tensor, plan: TilePlan, heads: HeadShape, sinks_KG: torch.Tensor | None
) -> torch.Tensor:
    kv_heads, rows = heads.num_kv_heads, heads.tile * heads.group
    q_NKRD = q_flat.index_select(0, plan.queries).view(-1, kv_heads, rows, heads.head_dim)
    out_NKRD = torch.empty_like(q_NKRD)
    is_plain = sinks_KG is None and not heads.is_biased
    multiplies = q_flat.dtype is torch.bfloat16 and not plan.is_answer and is_plain and not has_amx()
    if multiplies:
        q_NKRD *= heads.scale
    counts = [bucket.num_tiles for bucket in plan.buckets]
    for bucket, q, out in zip(plan.buckets, q_NKRD.split(counts), out_NKRD.split(counts), strict=True):
        k, v = pages.index_select(0, bucket.pages).view(2, len(q), kv_heads, -1, heads.head_dim)
        if multiplies:
            assert not heads.window, "only the newest tile is masked"
            _multiply(q, k, v, bucket.mask_RT[:, -heads.tile :], out)
        else:
            out.copy_(_flash_tiles(q, k, v, bucket, heads, sinks_KG))
    width = heads.group * heads.head_dim
    return out_NKRD.view(-1, width).index_select(0, plan.outputs).view(-1, kv_heads * width)


def _flash_tiles(
    q_NKRD: torch.Tensor,
    k_NKTD: torch.Tensor,
    v_NKTD: torch.Tensor,
    bucket: TileBucket,
    heads: HeadShape,
    sinks_KG: torch.Tensor | None,
) -> torch.Tensor:
    mask = bucket.mask_RT[None, None]
    out, lse = _flash(q_NKRD, k_NKTD, v_NKTD, 0.0, False, attn_mask=mask, scale=heads.scale)
    # Rows of a tile: heads of a group, token by token.
    return out if sinks_KG is None else _sink(out, lse, sinks_KG.repeat(1, heads.tile))


def _multiply(
    q_NKRD: torch.Tensor, k_NKTD: torch.Tensor, v_NKTD: torch.Tensor, mask_RQ: torch.Tensor, out_NKRD: torch.Tensor
) -> None:
    """Return attention of scaled queries by matrix products.

    In bfloat16 1.7 times as fast as the flash kernel, whose products are float32 without AMX. With it that kernel is 3
    times as fast as this.
    """
    q, k, v, out = (x.flatten(0, 1) for x in (q_NKRD, k_NKTD, v_NKTD, out_NKRD))
    scores = torch.bmm(q, k.transpose(1, 2))
    scores[:, :, -mask_RQ.shape[1] :] += mask_RQ
    torch.bmm(scores.softmax(-1), v, out=out)
