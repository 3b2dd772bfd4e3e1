"""The rule by which drafted tokens are kept: the model's own, or a fixed number to measure with."""

import random
from typing import Protocol

from contracts.errors import ConfigError
from engine.sequence import Sequence
from engine.settings import EngineSettings
from engine.speculative.proposer import Draft


class AcceptanceRule(Protocol):
    """The judge of one drafted token after the other."""

    def accepts(self, sequence: Sequence, draft: Draft, place: int) -> bool:
        """Return whether the draft's token of this place is kept, where those before it were."""
        ...


class ModelsToken:
    """Keeps the token that the model has drawn itself, so that answers are those without drafts."""

    def accepts(self, sequence: Sequence, draft: Draft, place: int) -> bool:
        return place < len(draft) and sequence.tokens[-1] == draft.token_ids[place]


class SyntheticAcceptance:
    """Keeps as many drafted tokens as give `length` tokens a round on average.

    The round's own token is one of them. What the model says of the others does not matter, so answers are nonsense:
    random weights, which foretell nothing, are measured with the acceptance that a trained drafter has. A draft shorter
    than `length` - 1 gives what it has.
    """

    def __init__(self, length: float) -> None:
        self._length = length
        self._coins = random.Random(0)

    def accepts(self, sequence: Sequence, draft: Draft, place: int) -> bool:
        """Return True for each whole token of the length, and for the rest of it with that chance."""
        return place < len(draft) and self._coins.random() < self._length - 1.0 - place


def acceptance_rule_of(settings: EngineSettings) -> AcceptanceRule:
    """Return the rule of an engine that drafts. Raises ConfigError, which names the field."""
    length, longest = settings.synthetic_acceptance, settings.draft_tokens + 1
    if not length:
        return ModelsToken()
    if not 1.0 <= length <= longest:
        raise ConfigError(
            f"synthetic_acceptance is {length:g}; a round with draft_tokens {longest - 1} gives 1 to {longest}"
        )
    return SyntheticAcceptance(length)
