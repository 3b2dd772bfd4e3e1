"""The sizes that batches, prompts and contexts are padded to, each of which a graph is captured for."""

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf

_MAX_CHUNK_ROWS = 2048  # a step's budget where nothing else is said


def batch_buckets(largest: int) -> tuple[int, ...]:
    """Return the numbers of rows that decode steps are padded to.

    1, 2, 4, 8, then steps of 8 to 64, of 16 to 128, of 32 beyond: a step costs at most a quarter too many rows.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, largest + 32, 32)]
    return (*[size for size in sizes if size < largest], largest)


def chunk_buckets(max_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows that passes of prompts are padded to.

    Up to as many as keep the device busy for longer than the host launches them. Steps of 64: a step that fills a usual
    budget is padded by none.
    """
    largest = min(max_rows, _MAX_CHUNK_ROWS)
    return (*range(64, largest, 64), largest)


def place_buckets(longest: int) -> tuple[int, ...]:
    """Return the numbers of tokens that drafts are padded to: each up to 4, then two to a doubling."""
    return (*[size for size in (1, 2, 3, 4, 6, 8, 12) if size < longest], longest)


def context_buckets(max_model_len: int) -> tuple[int, ...]:
    """Return the contexts for which attention is launched differently.

    Tuned up to 2048 tokens, by rule beyond.
    """
    return (*[size for size in (2048, 16384) if size < max_model_len], max_model_len)


def bucket_for(buckets: SequenceOf[int], count: int) -> int:
    """Return the smallest bucket that holds `count`. Raises IndexError if none does."""
    return buckets[bisect_left(buckets, count)]
