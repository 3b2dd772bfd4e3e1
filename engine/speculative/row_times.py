"""How long a step of so many rows takes, measured as steps come."""

from bisect import bisect_left

LEVEL_WEIGHT = 0.2
"""The weight of a new step in how long steps take at present, with their contexts and beside others."""
SHAPE_WEIGHT = 0.05
"""The weight of a new step in how much longer its number of rows takes than others."""
SUDDEN = 3.0
"""How many times longer than foretold a step must be to be left out, unless it is so twice in a row."""
UNSEEN_ROW = 0.5
"""What a row more costs where it was never tried, in shares of what a row costs on average."""


class RowTimes:
    """Seconds of steps of answers alone, by their rows: a level that moves, times a shape that does not."""

    def __init__(self) -> None:
        self._level_s = 0.0
        self._shape: dict[int, float] = {}
        self._was_sudden = False

    @property
    def is_known(self) -> bool:
        return bool(self._shape)

    def record(self, num_rows: int, span_s: float) -> None:
        """Take in a step that is done."""
        if num_rows <= 0 or span_s <= 0.0:
            return
        if not self._shape:
            self._level_s, self._shape[num_rows] = span_s, 1.0
            return
        was_sudden, self._was_sudden = self._was_sudden, span_s > SUDDEN * self.step_s(num_rows)
        if self._was_sudden and not was_sudden:
            return
        if num_rows not in self._shape:
            self._shape[num_rows] = span_s / self._level_s
        self._level_s += LEVEL_WEIGHT * (span_s / self._shape[num_rows] - self._level_s)
        self._shape[num_rows] += SHAPE_WEIGHT * (span_s / self._level_s - self._shape[num_rows])

    def step_s(self, num_rows: int) -> float:
        """Return the seconds of a step; 0.0 while none is known.

        Between known numbers of rows by a straight line.
        """
        known = sorted(self._shape)
        if not known:
            return 0.0
        place = bisect_left(known, num_rows)
        if place == len(known):
            most = known[-1]
            return self._level_s * self._shape[most] * (1.0 + UNSEEN_ROW * (num_rows - most) / most)
        high = known[place]
        if high == num_rows or place == 0:
            return self._level_s * self._shape[high]
        low = known[place - 1]
        share = (num_rows - low) / (high - low)
        return self._level_s * (self._shape[low] + share * (self._shape[high] - self._shape[low]))
