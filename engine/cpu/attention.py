"""Paged attention on the CPU in plain torch, planned once a step and run in every layer.

The native runner, engine.cpu.native, has its own in kernels/csrc/cpu/attention.h.

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

from engine.cpu.decode_attention import DecodeAttentionPlan, add_sink, attend_decodes, flash, page_index
from engine.cpu.head_shape import HeadShape
from engine.cpu.kv_cache import KVCache
from kernels.cpu.isa import has_amx


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
    """`decodes`: those of one token a sequence, then those with drafts."""

    decodes: tuple[DecodeAttentionPlan, ...]
    tiles: tuple[TilePlan, ...]


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
    # One for all: the mask of a shorter context is the end of it. Of a latent, which all heads read, each is large.
    longest = None if window else _causal_mask(int(tiles.max()), heads, 0, 0).to(cache.dtype)
    return TilePlan(
        is_answer=chunks.is_answer,
        buckets=tuple(
            _plan_bucket(chunks, owners[tiles == tile], int(tile), heads, cache, window, longest)
            for tile in np.unique(tiles)
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
    chunks: TiledChunks,
    owners: np.ndarray,
    tile: int,
    heads: HeadShape,
    cache: KVCache,
    window: int,
    longest: torch.Tensor | None,
) -> TileBucket:
    first = max(tile * heads.tile - window + 1, 0) // 64 * 64 if window else 0
    columns = np.arange(first // cache.group.block_size, (tile + 1) * heads.tile // cache.group.block_size)
    last_blocks = (chunks.starts + chunks.counts - 1) // cache.group.block_size  # see plan_decode
    blocks = chunks.tables[owners[:, None], np.minimum(columns, last_blocks[owners, None])]
    if longest is None:
        mask = _causal_mask(tile, heads, first, window).to(cache.dtype)
    else:
        mask = longest[:, -(tile + 1) * heads.tile :]
    return TileBucket(
        num_tiles=len(owners),
        pages=page_index(blocks, cache.group, cache.num_blocks),
        mask_RT=mask,
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

    `pages` is KVCache.pages of the layer; a latent is key and value. `sinks_KG` are logits of a token that each head
    sees and that gives nothing.
    """
    if not len(q_MHD):
        return q_MHD.flatten(1)
    parts, first = [], 0
    for decode in plan.decodes:
        parts.append(attend_decodes(q_MHD[first : first + decode.num_rows], pages, decode, heads, sinks_KG))
        first += decode.num_rows
    q_flat = q_MHD.reshape(len(q_MHD) * heads.num_kv_heads, -1)
    parts += [_tiles(q_flat, pages, tiles, heads, sinks_KG) for tiles in plan.tiles]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _tiles(
    q_flat: torch.Tensor, pages: torch.Tensor, plan: TilePlan, heads: HeadShape, sinks_KG: torch.Tensor | None
) -> torch.Tensor:
    kv_heads, rows = heads.num_kv_heads, heads.tile * heads.group
    q_NKRD = q_flat.index_select(0, plan.queries).view(-1, kv_heads, rows, heads.head_dim)
    out_NKRD = torch.empty_like(q_NKRD)
    is_plain = sinks_KG is None and not heads.is_biased and not heads.window
    multiplies = q_flat.dtype is torch.bfloat16 and not plan.is_answer and is_plain and not has_amx()
    if multiplies:
        q_NKRD *= heads.scale
    counts = [bucket.num_tiles for bucket in plan.buckets]
    for bucket, q, out in zip(plan.buckets, q_NKRD.split(counts), out_NKRD.split(counts), strict=True):
        kv = pages.index_select(0, bucket.pages)
        kv = kv.view(-1, len(q), kv_heads, bucket.mask_RT.shape[1], heads.head_dim)
        k, v = kv[0], kv[-1]  # a latent is both
        if multiplies:
            # Only the newest tile is masked.
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
    out, lse = flash(q_NKRD, k_NKTD, v_NKTD, 0.0, False, attn_mask=mask, scale=heads.scale)
    # Rows of a tile: heads of a group, token by token.
    return out if sinks_KG is None else add_sink(out, lse, sinks_KG.repeat(1, heads.tile))


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
