"""How long a step takes, learned from the steps that ran.

A step with N answers takes as long as one of these alone, and longer by what its prompts add. Both are taken to be
lines, by the number of answers and by the rows of prompts: on an H200 a step of Llama-8B's shape is within 0.5 ms of
that (bench/results/2026-11-26-engine-gpu-mixed-ending-h200.md). A prompt's rows also attend to what is before them: so
many seconds for each pair of a token and an earlier one.
"""

from collections import deque
from collections.abc import Collection, Iterable
from statistics import median

NUM_LAST = 16
"""The last steps of a size that count."""
DECAY = 0.97
"""What a sample keeps of its weight with each one behind it, of any size: thirty later it counts for two fifths."""
MAX_WEIGHT = 8.0
SUDDEN = 4.0
"""How many times longer than foretold a step must be to be taken for one in which the process was stopped."""
CUT = 1.5
"""How far above the median of its size a step may be where it is told what a context costs."""
ANSWERS_STEP = 8
"""Batches of about as many answers are of one size."""


class StepTimeModel:
    """Foretells the seconds of a step. Unknown parts count as nothing until a step has shown them."""

    def __init__(self) -> None:
        self._alone, self._added = _Line(), _Line(from_zero=True)
        self._was_sudden = False

    @property
    def knows_prompts(self) -> bool:
        """Whether a step with prompts and answers has been seen."""
        return self._added.is_known

    def record(self, num_prompt_rows: int, num_answers: int, num_attended: float, span_s: float) -> None:
        """Learn from a step that is done. `num_attended`: see `step_s`.

        One that is suddenly many times longer counts only if the next is as well: a host that stood still says nothing
        about the device.
        """
        if not num_answers or span_s <= 0:
            return
        known = self._added.is_known if num_prompt_rows else self._alone.is_known
        was_sudden = self._was_sudden
        self._was_sudden = known and span_s > SUDDEN * self.step_s(num_prompt_rows, num_answers, num_attended)
        if self._was_sudden and not was_sudden:
            return
        if num_prompt_rows:
            self._added.add(num_prompt_rows, max(0.0, span_s - self.step_s(0, num_answers)), num_attended)
        else:
            self._alone.add(-(-num_answers // ANSWERS_STEP) * ANSWERS_STEP, span_s)

    def step_s(self, num_prompt_rows: int, num_answers: int, num_attended: float = 0.0) -> float:
        """Return the seconds of a step that nearly all of its size keep to: three in four do.

        `num_attended`: the pairs of a prompt's token and one before its chunk.
        """
        alone_s = self._alone.at(num_answers)
        return alone_s + self._added.at(num_prompt_rows, num_attended) if num_prompt_rows else alone_s


class _Line:
    """A line through upper quartiles of samples by size, the newer ones of more weight.

    It never falls, nor is below zero; another figure of each sample may add to it in proportion. `from_zero`: one size
    alone gives a line through the origin, else a constant.
    """

    def __init__(self, from_zero: bool = False) -> None:
        self._from_zero = from_zero
        self._samples: dict[int, deque[tuple[float, float]]] = {}
        self._weights: dict[int, float] = {}
        self._base = self._slope = self._per_other = 0.0

    @property
    def is_known(self) -> bool:
        return bool(self._samples)

    def add(self, size: int, seconds: float, other: float = 0.0) -> None:
        """Take in a sample, and forget sizes that were not seen for long."""
        for known in list(self._weights):
            self._weights[known] *= DECAY
            if self._weights[known] < 1e-3:
                del self._weights[known], self._samples[known]
        self._samples.setdefault(size, deque(maxlen=NUM_LAST)).append((seconds, other))
        self._weights[size] = min(self._weights.get(size, 0.0) + 1.0, MAX_WEIGHT)
        self._fit()

    def at(self, size: int, other: float = 0.0) -> float:
        return max(0.0, self._base + self._slope * size) + self._per_other * other

    def _fit(self) -> None:
        """Fit by weighted least squares.

        Through the origin, or level, where the line would fall or begin below zero.
        """
        self._per_other = max(0.0, _slope_within(self._samples.values()))
        rows = [(size, self._upper_quartile(size), weight) for size, weight in self._weights.items()]
        total = sum(weight for _, _, weight in rows)
        mean_x = sum(weight * x for x, _, weight in rows) / total
        mean_y = sum(weight * y for _, y, weight in rows) / total
        spread = sum(weight * (x - mean_x) ** 2 for x, _, weight in rows)
        common = sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in rows)
        slope = common / spread if spread > 0 else -1.0
        if slope < 0:
            slope = mean_y / mean_x if self._from_zero else 0.0
        if mean_y < slope * mean_x:
            slope = mean_y / mean_x
        self._base, self._slope = mean_y - slope * mean_x, slope

    def _upper_quartile(self, size: int) -> float:
        rest = sorted(max(0.0, seconds - self._per_other * other) for seconds, other in self._samples[size])
        return rest[int(0.75 * (len(rest) - 1))]


def _slope_within(groups: Iterable[Collection[tuple[float, float]]]) -> float:
    """Return how samples of one size rise with their other figure.

    One far above the median of its size is cut to it.
    """
    spread = common = 0.0
    for group in groups:
        most = CUT * median(seconds for seconds, _ in group)
        mean_y = sum(min(y, most) for y, _ in group) / len(group)
        mean_x = sum(x for _, x in group) / len(group)
        spread += sum((x - mean_x) ** 2 for _, x in group)
        common += sum((x - mean_x) * (min(y, most) - mean_y) for y, x in group)
    return common / spread if spread else 0.0
