"""Drafts are asked for where they pay, by the tokens and the seconds of steps with and without."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from engine.sequence import Sequence
from engine.speculative.proposer import Draft
from engine.speculative.speculator import Speculator
from tests.engine.speculative.drafting import sequence_of

# Rows of a step beside its milliseconds, and a head's draft of one answer: 2026-11-29-speculation-native-intel-xeon.
ROWS_MS = ((1, 9.02), (2, 10.48), (3, 12.12), (4, 12.26), (5, 14.21), (6, 15.3), (16, 38.0), (64, 137.0))
PLACE_MS = 0.66
ANSWER = 128


def step_ms(num_rows: int) -> float:
    rows, spans = zip(*ROWS_MS, strict=True)
    return float(np.interp(num_rows, rows, spans))


class LikelyProposer:
    """Guesses always, and says how likely each token is: as likely as it is right."""

    def __init__(self, right: float) -> None:
        self.right, self.was_asked = right, False
        self._random = np.random.default_rng(1)

    def propose(self, sequences, num_tokens) -> list[Draft]:
        self.was_asked = True
        return [self._draft(count) for count in num_tokens]

    def end_sequence(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def _draft(self, count: int) -> Draft:
        likelihoods = self._random.beta(4 * self.right, 4 * (1 - self.right), count)
        return Draft(tuple(range(count)), 1, tuple(likelihoods))


@dataclass
class Simulation:
    """Answers one after the other, so many at a time; steps take what `step_ms` says, times noise."""

    proposer: LikelyProposer
    num_answers: int
    place_ms: float
    noise: float = 0.1
    slowness: float = 1.0

    def __post_init__(self) -> None:
        self.speculator = Speculator(self.proposer, 3, 4096)
        self._random = np.random.default_rng(2)

    def run(self, num_batches: int) -> float:
        """Return how many times as fast it is as without drafts, all it costs to find out counted."""
        told = spent = plain = 0.0
        for _ in range(num_batches):
            for num_tokens, seconds in self._batch():
                told, spent = told + num_tokens, spent + seconds
                plain += num_tokens * step_ms(self.num_answers) / self.num_answers
        assert told
        return plain / spent

    def _batch(self) -> Iterator[tuple[int, float]]:
        sequences = [sequence_of([5, 6, 7], 1) for _ in range(self.num_answers)]
        num_told = 0
        while num_told < ANSWER * self.num_answers:
            self.proposer.was_asked = False
            drafts = self.speculator.propose(sequences, 1000)
            accepted = [self._accepted(draft) for draft in drafts]
            for sequence, draft, count in zip(sequences, drafts, accepted, strict=True):
                if draft:
                    self.speculator.record_draft(sequence, draft, count)
            num_rows = self.num_answers + sum(map(len, drafts))
            costs = 3 * self.place_ms * (0.5 + 0.5 * self.num_answers) if self.proposer.was_asked else 0.0
            noise = self.slowness * float(self._random.lognormal(0, self.noise))
            self.speculator.record_step(num_rows, (step_ms(num_rows) + costs) * noise, drafting_s=costs * noise)
            num_told += self.num_answers + sum(accepted)
            yield self.num_answers + sum(accepted), (step_ms(num_rows) + costs)

    def _accepted(self, draft: Draft) -> int:
        wrong = np.flatnonzero(self._random.random(len(draft)) >= draft.likelihoods) if draft else []
        return int(wrong[0]) if len(wrong) else len(draft)


@pytest.mark.parametrize("num_answers", [1, 4, 8, 16])
@pytest.mark.parametrize(("right", "place_ms"), [(0.05, PLACE_MS), (0.4, PLACE_MS), (0.6, 0.05), (0.9, PLACE_MS)])
def test_what_does_not_pay_costs_two_percent_at_most(num_answers: int, right: float, place_ms: float):
    """Measuring it is counted; the steps before anything is known are not."""
    simulation = Simulation(LikelyProposer(right), num_answers, place_ms)
    simulation.run(2)
    assert simulation.run(6) >= 0.975


def test_what_pays_is_asked_for():
    simulation = Simulation(LikelyProposer(0.9), 1, PLACE_MS)
    simulation.run(1)
    assert simulation.run(4) > 2


def test_text_that_is_guessed_better_than_the_text_before_is_found_out():
    proposer = LikelyProposer(0.1)
    simulation = Simulation(proposer, 1, PLACE_MS)
    assert simulation.run(6) < 1.01
    proposer.right = 0.9
    simulation.run(2)
    assert simulation.run(4) > 1.8


def test_a_machine_that_gets_slower_says_nothing_of_drafts():
    """A step is compared with what one without takes at present."""
    simulation = Simulation(LikelyProposer(0.9), 1, PLACE_MS)
    simulation.run(1)
    simulation.slowness = 3.0
    assert simulation.run(2) > 1.9
    simulation.slowness = 1.0
    assert simulation.run(2) > 1.9
