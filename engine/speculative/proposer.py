"""The interface of a drafter: a file of its own makes another one."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.sequence import Sequence
from engine.settings import MAX_DRAFT_TOKENS

UNKNOWN = -1
"""In place of a token that the device drafts in the step that verifies it."""


@dataclass(frozen=True)
class Draft:
    """The tokens that may come next of an answer, in order.

    `strength`: how good a proposer takes its guess for, of whatever scale; acceptance is measured for each by itself.
    `likelihoods`: of each token, given that those before it are right, as far as the proposer can tell; empty for no
    opinion. `distributions`: `[vocab]` of each token, which was drawn from it: rejection sampling then keeps that of
    the model. Empty if each token is the only one that could have been guessed there, a point mass.
    """

    token_ids: tuple[int, ...] = ()
    strength: int = 0
    likelihoods: tuple[float, ...] = ()
    distributions: tuple[np.ndarray, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, num_tokens: int) -> "Draft":
        """Return the draft cut to so many tokens."""
        if num_tokens >= len(self):
            return self
        return Draft(
            self.token_ids[:num_tokens],
            self.strength,
            self.likelihoods[:num_tokens],
            self.distributions[:num_tokens],
        )

    def drawn(self, place: int) -> "DrawnGuess | None":
        """Return the token of this place with its distribution; None for a point mass, or where there is none."""
        if place >= len(self) or not self.distributions:
            return None
        return DrawnGuess(self.token_ids[place], self.distributions[place])

    @property
    def is_unknown(self) -> bool:
        """Return whether the device is yet to draft its tokens, behind the newest one of the answer."""
        return UNKNOWN in self.token_ids

    def likelihood(self, place: int) -> float:
        return self.likelihoods[place] if self.likelihoods else 1.0


@dataclass(frozen=True)
class DrawnGuess:
    """A drafted token that was drawn from `q_V`, `[vocab]` probabilities."""

    token_id: int
    q_V: np.ndarray


NO_DRAFT = Draft()


def spare_blocks(block_size: int) -> int:
    """Return how many blocks the longest draft may need behind that of its sequence's newest token."""
    return -(-(MAX_DRAFT_TOKENS - 1) // block_size)


class Proposer(Protocol):
    """A source of drafts. What it keeps of a sequence it finds by the sequence, and forgets with it."""

    def propose(self, sequences: SequenceOf[Sequence], num_tokens: SequenceOf[int]) -> list[Draft]:
        """Return a draft of at most so many tokens for each sequence, of none where there is no guess.

        The newest token of each sequence is known.
        """
        ...

    def end_sequence(self, sequence: Sequence) -> None:
        """Take note that nothing follows the sequence, whose text may help others of its cache salt."""
        ...
