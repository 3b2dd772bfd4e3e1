"""How many drafted tokens the target accepts, on texts that it wrote greedily.

A draft from a position depends on what was written up to there and on its own tokens, which count as long as they are
what the target wrote. So all positions are computed at once with the written tokens, and the walk over a text then
visits those that a server would draft from: after a draft of which a tokens were accepted it goes on a + 1 further.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tools.eagle3.corpus import Corpus
from tools.eagle3.draft_model import Eagle3Draft
from tools.eagle3.generation import Written
from tools.eagle3.target import TargetModel

LENGTHS = (1, 2, 3, 5)
"""Lengths of drafts that are reported."""
LONGEST_NGRAM = 5
TEXTS_AT_ONCE = 64

CountAccepted = Callable[[int, int], int]
"""(position, k) -> how many of k drafts from there are accepted; the position's own token is the last that is known."""


@dataclass
class Acceptance:
    """What a walk counted: rounds, and tokens that they gave, the target's own one of each round included."""

    rounds: int = 0
    tokens: int = 0

    @property
    def length(self) -> float:
        """Tokens a round: the acceptance length with the bonus token."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def walk(self, text: Written, k: int, count_accepted: CountAccepted) -> None:
        """Count the rounds over a text. The first token comes with the prompt, before any draft."""
        known, last = text.start, len(text.tokens) - 1
        while known < last:
            given = min(count_accepted(known, k) + 1, last - known)
            self.rounds += 1
            self.tokens += given
            known += given


@torch.no_grad()
def draft_hits(draft: Eagle3Draft, target: TargetModel, texts: Sequence[Written], k: int) -> list[list[int]]:
    """Return for each text and position how many of k drafts from there are right, one after the other."""
    found: list[list[int]] = []
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        corpus = Corpus(texts[start : start + TEXTS_AT_ONCE], target.device)
        batch = corpus.batch(range(len(corpus)))
        tokens, length = batch.tokens, batch.tokens.shape[1]
        hits = torch.zeros_like(tokens)
        is_right = torch.ones_like(tokens, dtype=torch.bool)
        place = torch.arange(length, device=tokens.device)
        for step, rows in enumerate(draft.rows(target.rows(tokens).aux, tokens, k)):
            said = draft.drafted[draft.lm_head(rows).argmax(-1)]
            right = torch.zeros_like(is_right)
            count = max(0, length - 2 - step)  # row i says token i + 2 + step, and knows token i + 1
            right[:, 1 : 1 + count] = said[:, :count] == tokens[:, 2 + step :]
            is_right &= right & (place + 1 + step < batch.lengths[:, None])
            hits += is_right
        found += [row[:size] for row, size in zip(hits.tolist(), batch.lengths.tolist(), strict=True)]
    return found


class PromptLookup:
    """Drafts what followed the newest earlier place of the longest suffix.

    A suffix has `LONGEST_NGRAM` tokens at most.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._num_known = tokens, 0
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in range(LONGEST_NGRAM + 1)]

    def hits(self, known: int, k: int) -> int:
        """Return how many of k drafts after `tokens[known]` are right; `known` never goes back."""
        tokens = self._tokens
        for end in range(self._num_known, known):
            for width in range(1, min(LONGEST_NGRAM, end + 1) + 1):
                self._places[width][tuple(tokens[end + 1 - width : end + 1])] = end
        self._num_known = known
        for width in range(min(LONGEST_NGRAM, known), 0, -1):
            end = self._places[width].get(tuple(tokens[known + 1 - width : known + 1]))
            if end is not None:
                drafts = tokens[end + 1 : min(end + 1 + k, known + 1)]
                truth = tokens[known + 1 : known + 1 + len(drafts)]
                same = [a == b for a, b in zip(drafts, truth, strict=False)]
                return same.index(False) if False in same else len(same)
        return 0


def head_acceptance(hits: Sequence[Sequence[int]], texts: Sequence[Written], k: int) -> Acceptance:
    """Return the acceptance of a head at drafts of k tokens, from `draft_hits` of as many or more."""
    found = Acceptance()
    for text, own in zip(texts, hits, strict=True):
        found.walk(text, k, lambda known, k, own=own: min(own[known], k))
    return found


def ngram_acceptance(texts: Sequence[Written], k: int) -> Acceptance:
    """Return the acceptance of prompt lookup at drafts of k tokens."""
    found = Acceptance()
    for text in texts:
        found.walk(text, k, PromptLookup(text.tokens.tolist()).hits)
    return found
