"""Attention in segments.

A token sees those that came since the last multiple of a length, itself included (Llama 4).

What a batch has of a segment is computed as a sequence of its own, whose first page is the segment's.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AttentionChunks:
    """Consecutive rows of a batch.

    `counts` `[N]` tokens from `starts` `[N]` on of sequences whose blocks are in `tables` `[N, pages]`; `answers`
    `[N]`: which are tokens of answers. Those come first.
    """

    tables: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    answers: np.ndarray


def cut(rows: AttentionChunks, segment: int, block_size: int) -> AttentionChunks:
    """The same rows in the same order, each stretch of one segment, whose tokens are whole blocks."""
    ends = rows.starts + rows.counts
    low, high = rows.starts // segment, -(-ends // segment)
    owners = np.repeat(np.arange(len(ends)), high - low)
    index = np.arange(len(owners)) - np.repeat(np.cumsum(high - low) - high, high - low)
    firsts = np.maximum(rows.starts[owners], index * segment)
    pages, width = segment // block_size, rows.tables.shape[1]
    columns = index[:, None] * pages + np.arange(min(pages, width))
    return AttentionChunks(
        rows.tables[owners[:, None], np.minimum(columns, width - 1)],
        firsts - index * segment,
        np.minimum(ends[owners], (index + 1) * segment) - firsts,
        rows.answers[owners],
    )
