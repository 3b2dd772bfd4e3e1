"""Speculative decoding as the scheduler and the step pipeline see it."""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from engine.sequence import Sequence
from engine.speculative.acceptance_rates import AcceptanceRates
from engine.speculative.draft_lengths import MIN_GAIN, choose_lengths
from engine.speculative.proposer import NO_DRAFT, Draft, Proposer
from engine.speculative.row_times import RowTimes

PROBE_PERIOD = 64
"""So often a draft that does not seem to pay is tried with one token.

What is never tried would never seem to pay again.
"""


MAX_AWAITED = 32
"""With more answers no step waits for drafts: to look for them takes the host some 20 us for each.

Of 64 random texts on an H200 a step took 4.09 ms where they were looked for, and 3.94 without.
"""


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

    `max_draft_tokens`: of a draft, at least 1. `is_adaptive`: rows are given by measured acceptance and step times;
    else each draft gets all. Pure: it reads no clock.
    """

    def __init__(self, proposer: Proposer, max_draft_tokens: int, max_model_len: int, is_adaptive: bool = True) -> None:
        self._proposer, self._max_draft_tokens = proposer, max_draft_tokens
        self._max_model_len, self._is_adaptive = max_model_len, is_adaptive
        self._rates, self._times, self._times_ahead = AcceptanceRates(), RowTimes(), RowTimes()
        self._num_unpaid = self._num_costly = self._num_unawaited = 0
        self.counters = DraftCounters(accepted_by_place=[0] * max_draft_tokens)

    def propose(self, sequences: SequenceOf[Sequence], max_rows: int) -> list[Draft]:
        """Return the draft of each sequence that is to be verified in the next step, empty ones among them.

        `sequences`: all that decode in it, a row each. `max_rows`: of all drafts together, at most.
        """
        limits = [self._limit(sequence) for sequence in sequences]
        if self._is_adaptive and not self._proposer.is_free:
            limits = self._worth_drafting(sequences, limits, max_rows)
        asked = [place for place, limit in enumerate(limits) if limit > 0]
        if not asked or max_rows <= 0:
            return [NO_DRAFT] * len(sequences)
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

    def record_step(self, num_rows: int, span_s: float, is_ahead: bool = False) -> None:
        """Learn from a step of so many rows, all of answers. Its seconds have those of its drafts in them.

        `is_ahead`: it was launched while the one before it was computed, so without drafts.
        """
        (self._times_ahead if is_ahead else self._times).record(num_rows, span_s)

    def awaits(self, sequences: SequenceOf[Sequence]) -> bool:
        """Return whether the next step should wait for the tokens of this one, so that drafts follow them.

        `sequences`: those that have a token drawn in this step, which is not known. A draft made now foretells it with
        its first token. What waits leaves the device idle until it is launched, so the tokens that the rest of such
        drafts promise must be worth that. Where it is not, it is tried now and then.
        """
        if not self._is_adaptive or not self._proposer.is_free:
            return any(self._limit(sequence) > 0 for sequence in sequences)
        if len(sequences) > MAX_AWAITED:
            return False
        asked = [sequence for sequence in sequences if self._limit(sequence) > 1]
        guesses = self._proposer.propose(asked, [1 + self._limit(sequence) for sequence in asked])
        chances = [self._rates.chances(each, guess)[1:] for each, guess in zip(asked, guesses, strict=True)]
        if not any(chances):
            return False
        if self._gain_of_waiting(len(sequences), chances) > MIN_GAIN:
            return True
        self._num_unawaited += 1
        return self._num_unawaited % PROBE_PERIOD == 0

    def _gain_of_waiting(self, num_rows: int, chances: SequenceOf[SequenceOf[float]]) -> float:
        """Return how many times the tokens a second of a step launched ahead one with such drafts promises.

        Infinity as long as nothing is known of the seconds of both.
        """
        ahead_s = self._times_ahead.step_s(num_rows)
        if not ahead_s or not self._times.is_known:
            return math.inf
        lengths = choose_lengths(chances, num_rows, sum(map(len, chances)), self._times.step_s)
        num_right = sum(sum(each[:length]) for each, length in zip(chances, lengths, strict=True))
        waited_s = self._times.step_s(num_rows + sum(lengths))
        return (num_rows + num_right) / waited_s * ahead_s / num_rows

    def ended(self, sequence: Sequence) -> None:
        """Take note that nothing follows the sequence."""
        self._proposer.ended(sequence)

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
        if not any(drafts):
            return [0] * len(drafts)
        if not self._is_adaptive or not self._proposer.is_free:  # a draft that has cost its time is verified whole
            return _fitting([len(draft) for draft in drafts], max_rows)
        chances = [self._rates.chances(sequence, draft) for sequence, draft in zip(sequences, drafts, strict=True)]
        return self._chosen(chances, max_rows)

    def _worth_drafting(self, sequences: SequenceOf[Sequence], limits: SequenceOf[int], max_rows: int) -> list[int]:
        """Return how many tokens to draft, by what is known before.

        Now and then none: else it would not be known how long a step without takes.
        """
        if not any(limits):
            return list(limits)
        self._num_costly += 1
        if self._num_costly % PROBE_PERIOD == 1:
            return [0] * len(limits)
        foretold = [self._rates.foretold(each, limit) for each, limit in zip(sequences, limits, strict=True)]
        return self._chosen(foretold, max_rows)

    def _chosen(self, chances: SequenceOf[SequenceOf[float]], max_rows: int) -> list[int]:
        """Return the lengths that pay; now and then one token where none does."""
        lengths = choose_lengths(chances, len(chances), max_rows, self._times.step_s)
        if any(lengths):
            return lengths
        self._num_unpaid += 1
        if self._num_unpaid % PROBE_PERIOD:
            return lengths
        likeliest = max(range(len(chances)), key=lambda place: chances[place][0] if chances[place] else 0.0)
        return [int(place == likeliest) for place in range(len(chances))]


def _fitting(lengths: SequenceOf[int], max_rows: int) -> list[int]:
    """Return the lengths, cut where their sum is beyond `max_rows`: the first come first."""
    fitting: list[int] = []
    for length in lengths:
        fitting.append(min(length, max_rows))
        max_rows -= fitting[-1]
    return fitting
