"""Drafts from the request's own text and from earlier answers, by how often each token followed.

SuffixDecoding (Oliaro et al., NeurIPS 2025): of the newest tokens the longest endings that occurred before say what
follows; each token has the share of the places where it did, and the ending whose guess promises most is taken. Its
trees are searched texts here: a few ten thousand tokens take numpy some ten microseconds.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np

from engine.sequence import Sequence
from engine.speculative.proposer import NO_DRAFT, Draft
from engine.speculative.text_matches import match_ends

MIN_LENGTH, MAX_LENGTH = 2, 16
"""The fewest tokens that must have occurred before, and the most that are looked for."""
MAX_PLACES, MAX_ENDINGS = 32, 4
"""The latest places of an ending that are counted, and the longest endings that are looked at: by the microsecond."""
MIN_LIKELIHOOD = 0.1
"""The likelihood of all tokens of a guess together below which it ends."""
MAX_EARLIER_TOKENS = 32_768
"""What is kept of earlier answers for each cache salt, the latest."""
MAX_SALTS = 16
_NO_TOKEN = np.array([-1], np.int32)


class SuffixProposer:
    """What requests of one cache salt were answered helps others of the same salt, and nobody else."""

    def __init__(self) -> None:
        self._earlier: OrderedDict[str, np.ndarray] = OrderedDict()

    def propose(self, sequences: SequenceOf[Sequence], num_tokens: SequenceOf[int]) -> list[Draft]:
        return [self._guess(sequence, count) for sequence, count in zip(sequences, num_tokens, strict=True)]

    def end_sequence(self, sequence: Sequence) -> None:
        """Keep the answer: a break before it, since it does not follow the one before."""
        salt, answer = sequence.cache_salt, np.array(sequence.tokens[sequence.answer_start :], np.int32)
        if len(answer) < MIN_LENGTH + 1:
            return
        kept = self._earlier.pop(salt, _NO_TOKEN)
        self._earlier[salt] = np.concatenate([kept, _NO_TOKEN, answer])[-MAX_EARLIER_TOKENS:]
        if len(self._earlier) > MAX_SALTS:
            self._earlier.popitem(last=False)

    def _guess(self, sequence: Sequence, num_tokens: int) -> Draft:
        own = np.frombuffer(sequence.tokens, np.int32)
        places = _TextMatches(own, self._earlier.get(sequence.cache_salt, _NO_TOKEN))
        best, most = NO_DRAFT, 0.0
        for length in places.lengths:
            draft = _most_frequent(places.after(length, num_tokens), length, num_tokens)
            if (promise := _promise(draft)) > most:  # of equals the longer ending's
                best, most = draft, promise
            if most == num_tokens:
                break
        return best


class _TextMatches:
    """The places of two texts, a request's own and earlier answers, that end as the own one does."""

    def __init__(self, own: np.ndarray, earlier: np.ndarray) -> None:
        ending = own[-MAX_LENGTH:]
        self._texts = own, earlier
        self._ends = [list(match_ends(text, ending, MAX_LENGTH, len(text) - 1)) for text in self._texts]

    @property
    def lengths(self) -> list[int]:
        """Return the lengths of endings worth a look, the longest first.

        Of two with the same places the longer.
        """
        counts = [
            sum(len(ends[length - 1]) for ends in self._ends if len(ends) >= length)
            for length in range(1, max(map(len, self._ends)) + 1)
        ]
        longest = range(len(counts), MIN_LENGTH - 1, -1)
        return [n for n in longest if n == len(counts) or counts[n - 1] > counts[n]][:MAX_ENDINGS]

    def after(self, length: int, num_tokens: int) -> list["_Continuation"]:
        """Return what follows the latest places of this length, the latest of the request's own last."""
        found = [
            _Continuation(text[end : end + num_tokens].tolist(), text is self._texts[0])
            for text, ends in zip(reversed(self._texts), reversed(self._ends), strict=True)
            if len(ends) >= length
            for end in ends[length - 1][-MAX_PLACES:]
        ]
        return found[-MAX_PLACES:]


@dataclass(frozen=True)
class _Continuation:
    """The tokens behind a place. The request's own text goes on with what is guessed."""

    token_ids: list[int]
    is_own: bool

    def at(self, place: int, guessed: list[int]) -> int:
        """Return the token of a place, or -1 behind the end of another text."""
        if place < len(self.token_ids):
            return self.token_ids[place]
        return guessed[place - len(self.token_ids)] if self.is_own else -1


def _most_frequent(left: list[_Continuation], length: int, num_tokens: int) -> Draft:
    """Return the likeliest token of all continuations, then of those that have it, and so on."""
    tokens: list[int] = []
    likelihoods: list[float] = []
    together = 1.0
    while len(tokens) < num_tokens:
        nexts = [each.at(len(tokens), tokens) for each in left]
        counts = Counter(token for token in reversed(nexts) if token >= 0)  # of equally frequent ones the latest
        if not counts:
            break
        ((token, count),) = counts.most_common(1)
        together *= count / len(left)
        if together < MIN_LIKELIHOOD:
            break
        likelihoods.append(count / len(left))
        left = [each for each, found in zip(left, nexts, strict=True) if found == token]
        tokens.append(token)
    return Draft(tuple(tokens), length, tuple(likelihoods))


def _promise(draft: Draft) -> float:
    """Return how many of its tokens are expected to be right."""
    return sum(accumulate(draft.likelihoods, mul))
