"""Speculative decoding as the scheduler and the step pipeline see it."""

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from engine.sequence import Sequence
from engine.speculative.acceptance_rates import AcceptanceRates
from engine.speculative.draft_lengths import MIN_GAIN, choose_lengths
from engine.speculative.payoff import DraftPayoff
from engine.speculative.proposer import NO_DRAFT, Draft, Proposer
from engine.speculative.row_times import RowTimes, size_class

PROBE_PERIOD = 64
"""So often a draft that does not seem to pay is tried with one token.

What is never tried would never seem to pay again.
"""


MAX_AWAITED = 32
"""With more answers no step waits for drafts: to look for them takes the host some 20 us for each.

Of 64 random texts on an H200 a step took 4.09 ms where they were looked for, and 3.94 without.
"""

DRAFTING_WEIGHT = 0.1
"""The weight of a new step in what drafts take at present."""


@dataclass
class DraftCounters:
    """The drafts since the start, and of their tokens how many were right, by their place in the draft."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_by_place: list[int] = field(default_factory=list)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_by_place)

    def add(self, num_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        for place in range(num_accepted):
            self.accepted_by_place[place] += 1


class Speculator:
    """The giver of rows to drafts: as many as pay.

    `max_draft_tokens`: of a draft, at least 1. `is_adaptive`: whether drafts are asked for, and how many of their
    tokens are computed, follows what was measured; else each draft gets all. Pure: it reads no clock.
    """

    def __init__(self, proposer: Proposer, max_draft_tokens: int, max_model_len: int, is_adaptive: bool = True) -> None:
        self._proposer, self._max_draft_tokens = proposer, max_draft_tokens
        self._max_model_len, self._is_adaptive = max_model_len, is_adaptive
        self._payoff, self._rates = DraftPayoff(), AcceptanceRates()
        self._times, self._times_ahead = RowTimes(), RowTimes()
        self._num_unpaid = self._num_unawaited = 0
        self._right: dict[Sequence, int] = {}
        self._has_asked = self._is_tried = False
        self._drafting_s: dict[int, float] = {}
        self.counters = DraftCounters(accepted_by_place=[0] * max_draft_tokens)

    def propose(self, sequences: SequenceOf[Sequence], max_rows: int) -> list[Draft]:
        """Return the draft of each sequence that is to be verified in the next step, empty ones among them.

        `sequences`: all that decode in it, a row each. `max_rows`: of all drafts together, at most.
        """
        self._right = dict.fromkeys(sequences, 0)
        limits = [self._limit(sequence) for sequence in sequences]
        self._has_asked = max_rows > 0 and any(limits)
        # Where steps are launched ahead, one that could have drafts has waited for them already.
        self._is_tried = self._has_asked and self._is_adaptive and not self._times_ahead.is_known
        if self._is_tried:
            self._has_asked = self._payoff.asks(sequences)
        if not self._has_asked:
            return [NO_DRAFT] * len(sequences)
        asked = [place for place, limit in enumerate(limits) if limit > 0]
        guesses = self._proposer.propose([sequences[place] for place in asked], [limits[place] for place in asked])
        drafts = [NO_DRAFT] * len(sequences)
        for place, draft in zip(asked, guesses, strict=True):
            drafts[place] = draft.first(limits[place])
        lengths = self._lengths(sequences, drafts, max_rows)
        return [draft.first(length) for draft, length in zip(drafts, lengths, strict=True)]

    def record_draft(self, sequence: Sequence, draft: Draft, num_accepted: int) -> None:
        """Learn what became of a draft that was verified."""
        self.counters.add(len(draft), num_accepted)
        self._rates.record(sequence, draft, num_accepted)
        self._right[sequence] = num_accepted

    def record_step(self, num_rows: int, span_s: float, is_ahead: bool = False, drafting_s: float = 0.0) -> None:
        """Learn from a step of so many rows, all of answers.

        `is_ahead`: it was launched while the one before it was computed, so without drafts. Else it is what was
        proposed for last, and `drafting_s` of its seconds went by until it was known what to compute.
        """
        if is_ahead:
            self._times_ahead.record(num_rows, span_s)
            return
        self._times.record(num_rows, span_s - drafting_s)
        num_answers = len(self._right)
        if self._has_asked:
            size = size_class(num_answers)
            known_s = self._drafting_s.setdefault(size, drafting_s)
            self._drafting_s[size] += DRAFTING_WEIGHT * (drafting_s - known_s)
        if self._is_tried and (plain_s := self._times.step_s(num_answers)):
            self._payoff.record(list(self._right), list(self._right.values()), span_s / plain_s)
        self._has_asked = self._is_tried = False

    def awaits(self, sequences: SequenceOf[Sequence]) -> bool:
        """Return whether the next step should wait for the tokens of this one, so that drafts follow them.

        `sequences`: those that have a token drawn in this step, which is not known. A draft made now foretells it with
        its first token, unless it is one that the device makes behind that token. What waits leaves the device idle
        until it is launched, so the tokens that the rest of such drafts promise must be worth that. Where it is not, it
        is tried now and then.
        """
        if not self._is_adaptive:
            return any(self._limit(sequence) > 0 for sequence in sequences)
        if len(sequences) > MAX_AWAITED:
            return False
        asked = [sequence for sequence in sequences if self._limit(sequence) > 1]
        guesses = self._proposer.propose(asked, [1 + self._limit(sequence) for sequence in asked])
        chances = [self._chances_behind(each, guess) for each, guess in zip(asked, guesses, strict=True)]
        if not any(chances):
            return False
        if self._gain_of_waiting(len(sequences), chances) > MIN_GAIN:
            return True
        self._num_unawaited += 1
        return self._num_unawaited % PROBE_PERIOD == 0

    def _chances_behind(self, sequence: Sequence, guess: Draft) -> list[float]:
        """Return the chances of what is drafted behind the token that is being drawn."""
        if guess.is_unknown:
            return self._rates.chances(sequence, guess.first(len(guess) - 1))
        return self._rates.chances(sequence, guess)[1:]

    def _gain_of_waiting(self, num_rows: int, chances: SequenceOf[SequenceOf[float]]) -> float:
        """Return how many times the tokens a second of a step launched ahead one with such drafts promises.

        Infinity as long as nothing is known of the seconds of both.
        """
        ahead_s = self._times_ahead.step_s(num_rows)
        if not ahead_s or not self._times.is_known:
            return math.inf
        step_s = self._step_s(num_rows)
        lengths = choose_lengths(chances, num_rows, sum(map(len, chances)), step_s)
        num_right = sum(sum(each[:length]) for each, length in zip(chances, lengths, strict=True))
        return (num_rows + num_right) / step_s(num_rows + sum(lengths)) * ahead_s / num_rows

    def end_sequence(self, sequence: Sequence) -> None:
        """Take note that nothing follows the sequence."""
        self._proposer.end_sequence(sequence)

    def _limit(self, sequence: Sequence) -> int:
        """Return how many tokens may be drafted.

        One that the answer has no room for would be computed in vain. Behind a token that is still being drawn there is
        nothing to go on from.
        """
        if not sequence.sampling.speculate or sequence.num_pending:
            return 0
        left = min(sequence.sampling.max_tokens - sequence.num_generated, self._max_model_len - len(sequence.tokens))
        return max(0, min(self._max_draft_tokens, left - 1))

    def _lengths(self, sequences: SequenceOf[Sequence], drafts: SequenceOf[Draft], max_rows: int) -> list[int]:
        """Return how many tokens of each draft are worth their rows; now and then one where none is."""
        if not any(drafts):
            return [0] * len(drafts)
        if not self._is_adaptive:
            return _fitting([len(draft) for draft in drafts], max_rows)
        chances = [self._rates.chances(sequence, draft) for sequence, draft in zip(sequences, drafts, strict=True)]
        lengths = choose_lengths(chances, len(chances), max_rows, self._step_s(len(chances)))
        if any(lengths):
            return lengths
        self._num_unpaid += 1
        if self._num_unpaid % PROBE_PERIOD:
            return lengths
        likeliest = max(range(len(chances)), key=lambda place: chances[place][0] if chances[place] else 0.0)
        return [int(place == likeliest) for place in range(len(chances))]

    def _step_s(self, num_answers: int) -> Callable[[int], float]:
        """Return the seconds of a step by its rows, those of its drafts among them; 0.0 if none is known."""
        drafting_s = self._drafting_s.get(size_class(num_answers), 0.0)
        return lambda num_rows: drafting_s + known_s if (known_s := self._times.step_s(num_rows)) else 0.0


def _fitting(lengths: SequenceOf[int], max_rows: int) -> list[int]:
    """Return the lengths, cut where their sum is beyond `max_rows`: the first come first."""
    fitting: list[int] = []
    for length in lengths:
        fitting.append(min(length, max_rows))
        max_rows -= fitting[-1]
    return fitting
