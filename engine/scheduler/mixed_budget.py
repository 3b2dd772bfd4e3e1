"""How many tokens of prompts a step computes beside answers.

Each answer waits for the whole step, so the fewer, the shorter the gaps between tokens; the more, the earlier the
prompts' first tokens (chunked prefill, Sarathi-Serve, Agrawal et al., OSDI 2024). The size follows the gap that is
asked for, the answers that run and the prompts that wait.
"""

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf

from engine.scheduler.batch import PROMPTS_SHARE, prompt_tokens_per_mixed_step
from engine.scheduler.step_time_model import StepTimeModel

HEADROOM = 0.95
"""Steps aim at this share of the objective, since one in four is longer than foretold."""
MIN_SPEED = 0.8
"""Chunks compute prompts at this share of the largest chunk's pace at least, whatever the objective. A step costs some
time however small its chunk is, and where that alone is as long as the objective, the smallest chunks would compute
next to nothing, and gaps be as long: on an H200 first tokens were 3 to 12 times later.
"""
MAX_DRAIN_S = 0.5
"""The longest that the prompts which wait here may take in steps of the objective. Beyond, steps get longer: a user who
waits for a first token has nothing to read yet.
"""


class MixedBudget:
    """The budget of steps with answers. It has no clock: `record` says what a step took.

    `max_tokens`: of a step's answers and prompts, a quarter of it the prompts' whatever the number of answers.
    `min_prompt`: a block. `graph_rows`: the sizes, ascending, to which the device pads a step; none if it pads none.
    `objective_s`: the gap that steps keep to; 0.0 for none, then a step has all of `max_tokens`.
    """

    def __init__(
        self, max_tokens: int, min_prompt: int, graph_rows: tuple[int, ...] = (), objective_s: float = 0.0
    ) -> None:
        self._max_tokens, self._min_prompt = max_tokens, min_prompt
        self._graph_rows, self._objective_s = graph_rows, objective_s
        self._times = StepTimeModel()

    @property
    def has_objective(self) -> bool:
        return self._objective_s > 0.0

    def record(self, num_prompt: int, num_answers: int, span_s: float, num_attended: float = 0.0) -> None:
        """Learn from a step of so many tokens of prompts and answers; `num_attended`: see StepTimeModel."""
        if self._objective_s:
            self._times.record(self._prompt_rows(num_prompt, num_answers), num_answers, num_attended, span_s)

    def prompt_tokens(self, num_answers: int, num_waiting: int, context: int = 0) -> int:
        """Return how many tokens of prompts the next step may compute.

        `num_waiting`: the tokens of all prompts that are to be computed here; `context`: how many are before those of
        the first.
        """
        most = max(prompt_tokens_per_mixed_step(self._max_tokens, num_answers), self._min_prompt)
        if not self._objective_s:
            return most
        sizes = self._sizes(num_answers, most)
        if not self._times.knows_prompts:
            first = int(self._max_tokens * PROMPTS_SHARE) - num_answers
            return sizes[bisect_left(sizes, first, hi=len(sizes) - 1)]
        short = self._within_objective(sizes, num_answers, context)
        short = max(short, self._fast_enough(sizes, num_answers))
        return next(
            (size for size in sizes[short:] if self._drain_s(size, num_answers, num_waiting) <= MAX_DRAIN_S), most
        )

    def _fast_enough(self, sizes: SequenceOf[int], num_answers: int) -> int:
        """Return the index of the smallest size that computes prompts at MIN_SPEED of the largest's pace."""
        paces = [size / max(self._step_s(size, num_answers), 1e-9) for size in sizes]
        return next(index for index, pace in enumerate(paces) if pace >= MIN_SPEED * paces[-1])

    def _within_objective(self, sizes: SequenceOf[int], num_answers: int, context: int) -> int:
        """Return the index of the largest size whose step keeps to the objective, or else of the smallest."""
        aim_s = HEADROOM * self._objective_s
        return max(0, bisect_left(sizes, True, key=lambda size: self._step_s(size, num_answers, context) > aim_s) - 1)

    def _drain_s(self, size: int, num_answers: int, num_waiting: int) -> float:
        return num_waiting * self._step_s(size, num_answers) / size

    def _step_s(self, num_prompt: int, num_answers: int, context: int = 0) -> float:
        num_attended = float(num_prompt * context)
        return self._times.step_s(self._prompt_rows(num_prompt, num_answers), num_answers, num_attended)

    def _sizes(self, num_answers: int, most: int) -> list[int]:
        """Return the tokens of prompts that fill a captured step, ascending, up to `most`."""
        least = min(self._min_prompt, most)
        rows = self._graph_rows or range(num_answers + least, num_answers + most, least)
        return [size for size in (count - num_answers for count in rows) if least <= size < most] + [most]

    def _prompt_rows(self, num_prompt: int, num_answers: int) -> int:
        """Return the rows that prompts take, with those that pad the step."""
        rows, total = self._graph_rows, num_prompt + num_answers
        index = bisect_left(rows, total)
        padded = rows[index] if index < len(rows) else total
        return padded - num_answers if num_prompt else 0
