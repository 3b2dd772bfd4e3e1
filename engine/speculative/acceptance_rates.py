"""How often drafted tokens are right, measured as answers go on."""

from collections import defaultdict
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from engine.sequence import Sequence
from engine.speculative.proposer import Draft

DECAY = 0.98
"""What a tried token leaves of those before it: fifty later they count for a third."""
PRIOR_TRIED, PRIOR_RATE = 2.0, 0.75
"""What is believed before anything was tried: hopeful, so that it is tried."""
OWN_PRIOR = 3.0
"""So many tokens of its own until a sequence counts as much as all others."""
MAX_STRENGTH = 16


@dataclass
class Tally:
    """Tokens that were tried and right, and how many were expected to be; the older count less."""

    right: float = 0.0
    expected: float = 0.0

    def add(self, is_right: bool, expected: float) -> None:
        self.right = self.right * DECAY + is_right
        self.expected = self.expected * DECAY + expected


class AcceptanceRates:
    """The chance of a drafted token, given that those before it are right.

    It is what the proposer says, times how often drafts of this strength are right where they say so, times how this
    sequence compares with that.
    """

    def __init__(self) -> None:
        self._by_strength: defaultdict[int, Tally] = defaultdict(Tally)
        self._by_sequence: WeakKeyDictionary[Sequence, Tally] = WeakKeyDictionary()

    def chances(self, sequence: Sequence, draft: Draft) -> list[float]:
        """Return for each token of the draft the chance that it and all before it are right."""
        rate, own = self._rate(draft), self._own(sequence)
        chances: list[float] = []
        together = 1.0
        for place in range(len(draft)):
            together *= min(1.0, rate * own * draft.likelihood(place))
            chances.append(together)
        return chances

    def record(self, sequence: Sequence, draft: Draft, num_accepted: int) -> None:
        """Learn from a verified draft: the tokens behind the first wrong one were not tried."""
        rate = self._rate(draft)
        own = self._by_sequence.setdefault(sequence, Tally())
        for place in range(min(num_accepted + 1, len(draft))):
            is_right, likelihood = place < num_accepted, draft.likelihood(place)
            self._by_strength[_strength(draft)].add(is_right, likelihood)
            own.add(is_right, rate * likelihood)

    def _rate(self, draft: Draft) -> float:
        tally = self._by_strength[_strength(draft)]
        return (tally.right + PRIOR_TRIED * PRIOR_RATE) / (tally.expected + PRIOR_TRIED)

    def _own(self, sequence: Sequence) -> float:
        tally = self._by_sequence.get(sequence)
        return 1.0 if tally is None else (tally.right + OWN_PRIOR) / (tally.expected + OWN_PRIOR)


def _strength(draft: Draft) -> int:
    return min(draft.strength, MAX_STRENGTH)
