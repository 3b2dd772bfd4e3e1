"""Attention in segments: a token sees those that came since the last multiple of a length, itself included (Llama 4).

What a batch has of a segment is computed as a sequence of its own, whose first page is the segment's.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Segments:
    """Rows of the batch in the same order, cut finer. `owners`: the piece that each is of; `tables` `[N, pages]`,
    `starts` and `counts` `[N]` in tokens, by segment.
    """

    owners: np.ndarray
    tables: np.ndarray
    starts: np.ndarray
    counts: np.ndarray


def cut(tables: np.ndarray, starts: np.ndarray, counts: np.ndarray, segment: int, block_size: int) -> Segments:
    """Pieces of sequences, `counts` tokens from `starts` on; `segment` tokens are whole blocks."""
    ends = starts + counts
    low, high = starts // segment, -(-ends // segment)
    owners = np.repeat(np.arange(len(starts)), high - low)
    index = np.arange(len(owners)) - np.repeat(np.cumsum(high - low) - high, high - low)
    firsts = np.maximum(starts[owners], index * segment)
    pages = segment // block_size
    columns = index[:, None] * pages + np.arange(min(pages, tables.shape[1]))
    return Segments(
        owners,
        tables[owners[:, None], np.minimum(columns, tables.shape[1] - 1)],
        firsts - index * segment,
        np.minimum(ends[owners], (index + 1) * segment) - firsts,
    )
