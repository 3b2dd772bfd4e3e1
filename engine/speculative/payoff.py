"""Whether drafts pay: tokens a second of steps that ask for them, against steps that do not.

The better way is taken, and the other one tried now and then, so seldom that this costs a LOSS of the time at most.
"""

from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from engine.sequence import Sequence
from engine.speculative.row_times import size_class

MIN_GAIN = 1.03
"""How many times as fast drafts must make answers to be asked for."""
LOSS = 0.005
"""The share of the time that trying the other way may cost."""
RUN = 4
"""So many steps in a row are of one way. The first of another way does not count: a head reads what it let lie."""
NUM_FIRST_RUNS = 4
"""So many runs, of both ways in turns, before anything is concluded."""
MIN_RUNS, MAX_RUNS = 3, 128
"""The fewest and the most runs between two of the other way."""
DECAY = 0.97
"""What an asked step leaves of those before it in what such steps give and take."""
OWN_PRIOR = 8.0
"""So many asked steps of its own until an answer counts as much as all others; before, it is new."""
MAX_TRIED_LOSS = 0.08
"""Drafts of new answers are tried where they cost no larger share of the steps that this takes."""


@dataclass
class _Asked:
    """Steps that asked for drafts.

    `num_right`: guessed tokens that were right, `span`: what they took, in steps without.
    """

    num_steps: float = 0.0
    num_right: float = 0.0
    span: float = 0.0

    def add(self, num_right: float, span: float = 0.0, decay: float = 1.0) -> None:
        self.num_steps = self.num_steps * decay + 1.0
        self.num_right = self.num_right * decay + num_right
        self.span = self.span * decay + span


@dataclass
class _Trial:
    """The steps of one number of answers, in runs; `num_alike` is the runs of the present way."""

    is_asking: bool = False
    is_turned: bool = False
    num_left: int = 0
    num_runs: int = 0
    num_alike: int = 0
    asked: _Asked = field(default_factory=_Asked)

    def begin_run(self, is_asking: bool) -> None:
        self.is_turned = is_asking is not self.is_asking
        self.num_alike = 1 if self.is_turned else self.num_alike + 1
        self.is_asking, self.num_left, self.num_runs = is_asking, RUN, self.num_runs + 1


class DraftPayoff:
    """The choice whether a step asks for drafts, by the number of its answers.

    What is right in a step is a mean of many, in which each answer counts by its own. Pure: it reads no clock.
    """

    def __init__(self) -> None:
        self._trials: defaultdict[int, _Trial] = defaultdict(_Trial)
        self._own: WeakKeyDictionary[Sequence, _Asked] = WeakKeyDictionary()

    def asks(self, sequences: SequenceOf[Sequence]) -> bool:
        """Return whether the next step, in which these decode, is to ask for drafts."""
        trial = self._trials[size_class(len(sequences))]
        if trial.num_left == 0:
            trial.begin_run(self._next_way(trial, sequences))
        return trial.is_asking

    def record(self, sequences: SequenceOf[Sequence], num_right: SequenceOf[int], span: float) -> None:
        """Learn from a step that did as `asks` said.

        `num_right` guessed tokens of each answer were right; it took as long as `span` steps without drafts.
        """
        trial = self._trials[size_class(len(sequences))]
        is_first = trial.is_turned and trial.num_left == RUN
        trial.num_left -= 1
        if is_first or not trial.is_asking:
            return
        trial.asked.add(sum(num_right) / len(num_right), span, DECAY)
        for sequence, count in zip(sequences, num_right, strict=True):
            self._own.setdefault(sequence, _Asked()).add(count)

    def gain(self, sequences: SequenceOf[Sequence]) -> float | None:
        """Return how many times as fast these answers come with drafts; None if nothing is known."""
        asked = self._trials[size_class(len(sequences))].asked
        if not asked.num_steps:
            return None
        usual = asked.num_right / asked.num_steps
        own = [self._own.get(sequence, _Asked()) for sequence in sequences]
        right = sum((each.num_right + OWN_PRIOR * usual) / (each.num_steps + OWN_PRIOR) for each in own)
        return (1.0 + right / len(sequences)) / (asked.span / asked.num_steps)

    def _next_way(self, trial: _Trial, sequences: SequenceOf[Sequence]) -> bool:
        gain = self.gain(sequences)
        if gain is None or trial.num_runs < NUM_FIRST_RUNS:
            return trial.num_runs % 2 == 1  # without first: what steps take is measured in those
        pays = gain >= MIN_GAIN
        loss = max(gain, 1.0 / gain) - 1.0  # of a step of the other way
        if not pays and loss < MAX_TRIED_LOSS and self._are_new(sequences):
            return True
        is_due = trial.num_alike >= min(max(loss / LOSS, MIN_RUNS), MAX_RUNS)
        return not pays if is_due and trial.is_asking is pays else pays

    def _are_new(self, sequences: SequenceOf[Sequence]) -> bool:
        """Return whether at least half of these have too few asked steps of their own to count by them."""
        own = [self._own.get(sequence, _Asked()) for sequence in sequences]
        return 2 * sum(each.num_steps < OWN_PRIOR for each in own) >= len(own)
