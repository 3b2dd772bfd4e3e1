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

from contracts.layout import KVLayout
from engine.kv_cache import KVCache
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
    """`window`: how many of the newest tokens a token sees in the layers that have one, itself included; `segment`: or
    those since the last multiple of it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    segment: int = 0

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def tile(self) -> int:
        """Tokens of a prefill tile: a multiple of 64 with at least `_MIN_TILE_ROWS` query rows."""
        return -(-_MIN_TILE_ROWS // self.group // 64) * 64


@dataclass(frozen=True)
class DecodePlan:
    """One query token a sequence. `pages` gathers `[2, P, K, part, D]`; `part_rows` is None when each sequence has
    one part.
    """

    num_rows: int
    pages: torch.Tensor
    mask_P11T: torch.Tensor
    part_rows: torch.Tensor | None
    slots_BS: torch.Tensor | None
    absent_BS11: torch.Tensor | None


@dataclass(frozen=True)
class TilePlan:
    """Tiles with the same context length. `queries` and `outputs` index `[M * K]` rows of G * D; spare rows point
    past the end.

    `is_answer`: recomputed tokens of an answer, which take the kernel that decode takes.
    """

    num_tiles: int
    is_answer: bool
    pages: torch.Tensor
    mask_RT: torch.Tensor
    queries: torch.Tensor
    outputs: torch.Tensor


@dataclass(frozen=True)
class AttentionPlan:
    decode: DecodePlan | None
    tiles: tuple[TilePlan, ...]


def page_index(blocks: np.ndarray, layout: KVLayout, num_blocks: int) -> torch.Tensor:
    """Blocks `[N, n]` -> rows of KVCache.pages for K and then V, in the order `[2, N, K, n]`."""
    heads = blocks[:, None, :] * layout.num_kv_heads + np.arange(layout.num_kv_heads)[None, :, None]
    return torch.from_numpy(np.stack([heads, heads + num_blocks * layout.num_kv_heads]).reshape(-1))


def plan_decode(tables: np.ndarray, lengths: np.ndarray, cache: KVCache, window: int = 0) -> DecodePlan:
    """`tables` `[B, n]` block ids (anything valid past the end), `lengths` `[B]` context tokens, the newest
    included. `window`: how many of them are seen, 0 for all; parts that lie before it are left out.
    """
    layout = cache.layout
    pages_per_part = DECODE_PART // layout.block_size
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
    return DecodePlan(
        num_rows=len(lengths),
        pages=page_index(blocks, layout, cache.num_blocks),
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
class Chunks:
    """Several chunks of tokens `[starts, starts + counts)`; their rows follow each other in the batch from
    `first_row` on.
    """

    tables: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    first_row: int
    is_answer: bool


def plan_tiles(
    chunks: Chunks, num_rows: int, heads: HeadShape, cache: KVCache, window: int = 0
) -> tuple[TilePlan, ...]:
    """One TilePlan for each context length among the tiles that the chunks touch. `num_rows`: of the whole batch;
    `window` as for plan_decode.
    """
    size, starts, ends = heads.tile, chunks.starts, chunks.starts + chunks.counts
    low, high = starts // size, -(-ends // size)
    owners = np.repeat(np.arange(len(starts)), high - low)
    tiles = np.arange(len(owners)) - np.repeat(np.cumsum(high - low) - high, high - low)
    first_rows = chunks.first_row + np.cumsum(chunks.counts) - chunks.counts
    positions = tiles[:, None] * size + np.arange(size)
    inside = (positions >= starts[owners, None]) & (positions < ends[owners, None])
    rows = np.where(inside, positions - starts[owners, None] + first_rows[owners, None], num_rows)
    return tuple(
        _plan_bucket(chunks, owners[tiles == tile], int(tile), rows[tiles == tile], num_rows, heads, cache, window)
        for tile in np.unique(tiles)
    )


def _plan_bucket(
    chunks: Chunks,
    owners: np.ndarray,
    tile: int,
    rows: np.ndarray,
    num_rows: int,
    heads: HeadShape,
    cache: KVCache,
    window: int,
) -> TilePlan:
    first = max(tile * heads.tile - window + 1, 0) // 64 * 64 if window else 0
    columns = np.arange(first // cache.layout.block_size, (tile + 1) * heads.tile // cache.layout.block_size)
    blocks = chunks.tables[owners[:, None], np.minimum(columns, chunks.tables.shape[1] - 1)]
    outputs = rows[:, None, :] * heads.num_kv_heads + np.arange(heads.num_kv_heads)[None, :, None]
    return TilePlan(
        num_tiles=len(rows),
        is_answer=chunks.is_answer,
        pages=page_index(blocks, cache.layout, cache.num_blocks),
        mask_RT=_causal_mask(tile, heads, first, window),
        queries=torch.from_numpy(np.where(outputs < num_rows * heads.num_kv_heads, outputs, 0).reshape(-1)),
        outputs=torch.from_numpy(outputs.reshape(-1)),
    )


def _causal_mask(tile: int, heads: HeadShape, first: int, window: int) -> torch.Tensor:
    """Of the rows of a tile over the context from token `first` on."""
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
    """Attention of every row over its own sequence, `[M, H * D]`. `pages` is KVCache.pages of the layer; `sinks_KG`
    are logits of a token that each head sees and that gives nothing.
    """
    if plan.decode and not plan.tiles:
        return _decode(q_MHD, pages, plan.decode, heads, sinks_KG)
    num_rows = q_MHD.shape[0]
    out = torch.empty((num_rows + 1, heads.num_heads * heads.head_dim), dtype=q_MHD.dtype)
    if plan.decode:
        count = plan.decode.num_rows
        out[:count] = _decode(q_MHD[:count], pages, plan.decode, heads, sinks_KG)
    q_flat = q_MHD.reshape(num_rows * heads.num_kv_heads, -1)
    out_flat = out.view((num_rows + 1) * heads.num_kv_heads, -1)
    for tiles in plan.tiles:
        out_flat.index_copy_(0, tiles.outputs, _tiles(q_flat, pages, tiles, heads, sinks_KG))
    return out[:num_rows]


def _decode(
    q_BHD: torch.Tensor, pages: torch.Tensor, plan: DecodePlan, heads: HeadShape, sinks_KG: torch.Tensor | None
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
    out_PKGD: torch.Tensor, lse_PKG: torch.Tensor, plan: DecodePlan, sinks_KG: torch.Tensor | None
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
    """Of each part in the softmax's denominator, to which a sink adds its own.

    Not by a sigmoid: torch computes the last few elements of one with another exponential than the others.
    """
    if sinks_KR is None:
        return lse_BSKR.softmax(1)
    sinks_B1KR = sinks_KR.expand(len(lse_BSKR), 1, -1, -1)
    return torch.cat([lse_BSKR, sinks_B1KR], 1).softmax(1)[:, :-1]


def _tiles(
    q_flat: torch.Tensor, pages: torch.Tensor, plan: TilePlan, heads: HeadShape, sinks_KG: torch.Tensor | None
) -> torch.Tensor:
    num, kv_heads, dim = plan.num_tiles, heads.num_kv_heads, heads.head_dim
    q_NKRD = q_flat.index_select(0, plan.queries).view(num, kv_heads, -1, dim)
    k_NKTD, v_NKTD = pages.index_select(0, plan.pages).view(2, num, kv_heads, -1, dim)
    if q_flat.dtype is torch.bfloat16 and not plan.is_answer and sinks_KG is None and not has_amx():
        assert not heads.window, "only the newest tile is masked"
        out = _multiply(q_NKRD, k_NKTD, v_NKTD, plan.mask_RT[:, -heads.tile :], heads.scale)
    else:
        out, lse = _flash(q_NKRD, k_NKTD, v_NKTD, 0.0, False, attn_mask=plan.mask_RT[None, None], scale=heads.scale)
        if sinks_KG is not None:
            out = _sink(out, lse, sinks_KG.repeat(1, heads.tile))  # rows of a tile: heads of a group, token by token
    return out.reshape(num * kv_heads * heads.tile, -1)


def _multiply(
    q_NKRD: torch.Tensor, k_NKTD: torch.Tensor, v_NKTD: torch.Tensor, mask_RQ: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention by matrix products: in bfloat16 1.7 times as fast as the flash kernel, whose products are float32
    without AMX. With it that kernel is 3 times as fast as this.
    """
    q, k, v = q_NKRD.flatten(0, 1), k_NKTD.flatten(0, 1), v_NKTD.flatten(0, 1)
    scores = torch.bmm(q * scale, k.transpose(1, 2))
    scores[:, :, -mask_RQ.shape[1] :].add_(mask_RQ.to(scores.dtype))
    return torch.bmm(scores.softmax(-1), v)
