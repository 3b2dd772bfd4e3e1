"""The places of a text that end as it ends now: what followed there may follow here.

Prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from collections.abc import Iterator

import numpy as np


def match_ends(text: np.ndarray, ending: np.ndarray, max_length: int, last: int) -> Iterator[np.ndarray]:
    """Yield where the last 1, 2, ... `max_length` tokens of `ending` occur in `text`, as long as they do.

    A place is the index of the token that follows it, ascending, at most `last`. Each array is a part of the one
    before.
    """
    if not len(ending):
        return
    ends = np.flatnonzero(text[:last] == ending[-1]) + 1
    for length in range(1, min(max_length, len(ending)) + 1):
        if length > 1:
            ends = ends[ends >= length]
            ends = ends[text[ends - length] == ending[-length]]
        if not len(ends):
            return
        yield ends


def continuation(text: np.ndarray, end: int, num_tokens: int) -> list[int]:
    """Return the tokens that follow `end`.

    A text that runs out goes on as it went from there (Ziv and Lempel 1977).
    """
    found = text[end : end + num_tokens].tolist()
    period = len(found)
    while period and len(found) < num_tokens:
        found.append(found[len(found) - period])
    return found
