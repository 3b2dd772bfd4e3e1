"""The log lines of a start that takes long."""

import math

PERIOD_S = 3.0
"""The seconds between two lines of one stage: a model of 80 layers is not 80 lines."""


class ProgressLog:
    """A line for each stage as it begins, then one each PERIOD_S at most. It reads no clock."""

    def __init__(self) -> None:
        self._stage, self._told_s = "", -math.inf

    def line(self, stage: str, done: int, total: int, now_s: float) -> str | None:
        """Return the line to log now, if any. `total` 0: not known."""
        is_new = stage != self._stage and (done < total or not total)
        if not is_new and now_s - self._told_s < PERIOD_S:
            return None
        self._stage, self._told_s = stage, now_s
        return f"{stage}: {done} of {total} ({100 * done // total} %)" if total > 1 else stage
