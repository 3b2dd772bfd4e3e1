"""What one engine step computes."""

from array import array
from dataclasses import dataclass

from engine.sequence import Sequence
from engine.speculative.proposer import NO_DRAFT, Draft

PROMPTS_SHARE = 0.25
"""The share of a step with answers that is the prompts', whatever the number of answers."""


def prompt_tokens_per_mixed_step(max_mixed_tokens: int, num_answers: int) -> int:
    """Return how many tokens of prompts fit in a step that decodes one token of each of `num_answers`."""
    return int(max(max_mixed_tokens - num_answers, max_mixed_tokens * PROMPTS_SHARE))


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens `[first_token, first_token + num_tokens)` of one sequence.

    `draft`: behind the newest token of an answer, those that are guessed to follow. They are not among `num_tokens`;
    each has a row of its own, which says what comes after it.
    """

    sequence: Sequence
    first_token: int
    num_tokens: int
    draft: Draft = NO_DRAFT

    @property
    def end(self) -> int:
        return self.first_token + self.num_tokens

    @property
    def num_rows(self) -> int:
        """Return how many rows of the batch it has: a token each, drafted ones among them."""
        return self.num_tokens + len(self.draft)

    @property
    def token_ids(self) -> "array[int]":
        """Return the tokens of its rows, those of the draft last."""
        tokens = self.sequence.tokens[self.first_token : self.end]
        tokens.extend(self.draft.token_ids)
        return tokens

    @property
    def is_answer(self) -> bool:
        """Tokens that were or are decoded: one in decode, several when a preempted sequence is computed again.

        Never mixed with what was prefilled: each is computed again as it was before, wherever that was.
        """
        return self.first_token >= self.sequence.num_prefilled

    @property
    def is_decode(self) -> bool:
        return self.is_answer and self.num_tokens == 1

    @property
    def samples(self) -> bool:
        """The piece reaches the newest token, so its last row says what comes next."""
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True)
class Batch:
    """Decodes first, those without drafts before the others, then recomputed answers, then prompts.

    `started`: sequences scheduled for the first time.
    """

    chunks: tuple[ScheduledChunk, ...]
    started: tuple[Sequence, ...]
