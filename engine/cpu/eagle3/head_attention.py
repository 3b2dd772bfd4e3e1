"""The attention of a drafting head: an EAGLE3 head's, or a layer's for multi-token prediction.

R rows of a sequence, K KV heads, D head size.
"""

from dataclasses import replace

import numpy as np
import torch

from engine.cpu.batch_inputs import kv_write_index
from engine.cpu.decode_attention import flash, page_index
from engine.cpu.eagle3.head_rows import HeadRows
from engine.cpu.head_shape import HeadShape
from engine.cpu.kv_cache import KVCache


class HeadAttention:
    """Attention over the draft cache, whose layers have heads of one shape."""

    def __init__(self, heads: HeadShape, cache: KVCache) -> None:
        self._heads, self._cache = heads, cache
        self.dtype = cache.dtype

    def write(self, index: int, kv_MHD: torch.Tensor, rows: HeadRows) -> None:
        """Write K and V of rows, or a latent, to the slots of their tokens."""
        blocks = rows.tables_SN[rows.owners_M, rows.slots_M // self._cache.group.block_size]
        places = kv_write_index(blocks.astype(np.int64), rows.slots_M.astype(np.int64), self._cache)
        self._cache.rows(index).index_copy_(0, places, kv_MHD.to(self._cache.dtype).flatten(0, 1))

    def attend(self, q_MHD: torch.Tensor, index: int, rows: HeadRows) -> torch.Tensor:
        """Return `[M, heads * D]`: all sequences at once where each has one row, else one after the other."""
        if len(rows.owners_M) == len(rows.tables_SN):
            return self._attend_alike(q_MHD, index, rows, 1)
        counts = np.bincount(rows.owners_M, minlength=len(rows.tables_SN))
        ends = np.cumsum(counts)
        parts = [
            self._attend_alike(q_MHD[end - count : end], index, _only(rows, owner, end - count, end), count)
            for owner, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True))
        ]
        return torch.cat(parts)

    def _attend_alike(self, q_MHD: torch.Tensor, index: int, rows: HeadRows, num_rows: int) -> torch.Tensor:
        """Return the same of sequences with `num_rows` each; the context is padded to the longest."""
        heads, group = self._heads, self._cache.group
        num_blocks = int(rows.slots_M.max()) // group.block_size + 1
        pages = page_index(rows.tables_SN[:, :num_blocks].astype(np.int64), group, self._cache.num_blocks)
        kv = self._cache.pages(index).index_select(0, pages)
        kv = kv.view(len(group.planes), len(rows.tables_SN), heads.num_kv_heads, -1, heads.head_dim)
        k, v = kv[0], kv[-1]  # a latent is both
        q = q_MHD.to(self._cache.dtype).reshape(-1, num_rows, heads.num_kv_heads, heads.group * heads.head_dim)
        q_SKRD = q.transpose(1, 2).reshape(len(k), heads.num_kv_heads, num_rows * heads.group, heads.head_dim)
        mask = _mask(rows, num_rows, num_blocks * group.block_size).repeat_interleave(heads.group, 1)
        out, _ = flash(q_SKRD, k, v, 0.0, False, attn_mask=mask[:, None].to(q.dtype), scale=heads.scale)
        out = out.view(len(k), heads.num_kv_heads, num_rows, -1).transpose(1, 2)
        return out.reshape(len(q_MHD), heads.num_heads * heads.head_dim)


def lasts(rows: HeadRows) -> HeadRows:
    """Return the last row of each sequence."""
    ends = rows.lasts_S
    return replace(
        rows,
        features_MH=rows.features_MH[torch.from_numpy(ends)],
        tokens_M=rows.tokens_M[ends],
        slots_M=rows.slots_M[ends],
        owners_M=rows.owners_M[ends],
    )


def _only(rows: HeadRows, owner: int, first: int, end: int) -> HeadRows:
    """Return the rows of one sequence."""
    return replace(
        rows,
        tables_SN=rows.tables_SN[owner : owner + 1],
        seen_from_S=rows.seen_from_S[owner : owner + 1],
        slots_M=rows.slots_M[first:end],
    )


def _mask(rows: HeadRows, num_rows: int, num_slots: int) -> torch.Tensor:
    """Return the mask `[S, R, slots]` of rows.

    They see the slots from the first that is there up to their own.
    """
    slots, context = rows.slots_M.reshape(-1, num_rows, 1), np.arange(num_slots)
    is_seen = (context <= slots) & (context >= rows.seen_from_S[:, None, None])
    return torch.from_numpy(np.where(is_seen, np.float32(0), np.float32(-np.inf)))
