"""Drafts from the request's own text, "prompt lookup".

They are what followed the newest tokens where these occurred last.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np

from engine.sequence import Sequence
from engine.speculative.proposer import NO_DRAFT, Draft
from engine.speculative.text_matches import continuation, match_ends

MIN_NGRAM, MAX_NGRAM = 2, 8
"""The fewest tokens that must have occurred before, and the most that are looked for."""


class NgramProposer:
    """The continuation of the latest of the longest matches.

    It keeps nothing: a search takes microseconds.
    """

    def propose(self, sequences: SequenceOf[Sequence], num_tokens: SequenceOf[int]) -> list[Draft]:
        return [_lookup(sequence, count) for sequence, count in zip(sequences, num_tokens, strict=True)]

    def end_sequence(self, sequence: Sequence) -> None:
        """Nothing was kept of it."""


def _lookup(sequence: Sequence, num_tokens: int) -> Draft:
    text = np.frombuffer(sequence.tokens, np.int32)
    length, ends = 0, np.empty(0, np.int64)
    for longer in match_ends(text, text[-MAX_NGRAM:], MAX_NGRAM, len(text) - 1):
        length, ends = length + 1, longer
    if length < MIN_NGRAM:
        return NO_DRAFT
    return Draft(tuple(continuation(text, int(ends[-1]), num_tokens)), length)
