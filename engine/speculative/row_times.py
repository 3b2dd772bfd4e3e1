"""How long a step of so many rows takes, measured as steps come."""

from dataclasses import dataclass

import numpy as np

LEVEL_WEIGHT = 0.2
"""The weight of a new step in how long steps take at present, with their contexts and beside others."""
SHAPE_WEIGHT = 0.05
"""The weight of a new step in how much longer its number of rows takes than others, once there are many."""
SUDDEN = 3.0
"""How many times longer than foretold a step must be to be left out, unless it is so twice in a row."""
UNSEEN_ROW = 0.5
"""What a row more costs where it was never tried, in shares of what a row costs on average."""
EXACT_ROWS = 8
"""Up to so many rows each number is known by itself; of more, those within a quarter of an octave are one class."""


def size_class(count: int) -> int:
    """Return the least number of rows, or of answers, that is of the same class as this one."""
    if count <= EXACT_ROWS:
        return count
    width = 1 << (count.bit_length() - 3)
    return count // width * width


@dataclass
class _Point:
    """The mean rows of a class of steps, and how much longer they take than others."""

    rows: float = 0.0
    shape: float = 0.0
    num_steps: int = 0

    def add(self, num_rows: int, shape: float) -> None:
        self.num_steps += 1
        weight = max(SHAPE_WEIGHT, 1.0 / self.num_steps)
        self.rows += weight * (num_rows - self.rows)
        self.shape += weight * (shape - self.shape)


class RowTimes:
    """Seconds of steps of answers alone, by their rows: a level that moves, times a shape that does not.

    The shape is a line through the means of classes of rows: were each number by itself, the best would be one of those
    that were measured too short.
    """

    def __init__(self) -> None:
        self._level_s = 0.0
        self._points: dict[int, _Point] = {}
        self._was_sudden = False

    @property
    def is_known(self) -> bool:
        return bool(self._points)

    def record(self, num_rows: int, span_s: float) -> None:
        """Take in a step that is done."""
        if num_rows <= 0 or span_s <= 0.0:
            return
        known_s = self.step_s(num_rows)
        was_sudden, self._was_sudden = self._was_sudden, 0.0 < SUDDEN * known_s < span_s
        if self._was_sudden and not was_sudden:
            return
        point = self._points.setdefault(size_class(num_rows), _Point())
        if point.num_steps:
            self._level_s += LEVEL_WEIGHT * (span_s / (known_s / self._level_s) - self._level_s)
        elif not known_s:
            self._level_s = span_s
        point.add(num_rows, span_s / self._level_s)

    def step_s(self, num_rows: int) -> float:
        """Return the seconds of a step; 0.0 while none is known. More rows never take less."""
        if not self._points:
            return 0.0
        points = sorted(self._points.values(), key=lambda point: point.rows)
        rows = np.array([point.rows for point in points])
        shapes = np.maximum.accumulate([point.shape for point in points])
        shape = float(np.interp(num_rows, rows, shapes))
        if num_rows > rows[-1]:
            shape *= 1.0 + UNSEEN_ROW * (num_rows - rows[-1]) / rows[-1]
        elif num_rows < rows[0] and len(points) > 1:
            slope = (shapes[1] - shapes[0]) / (rows[1] - rows[0])
            shape = max(shape - slope * (rows[0] - num_rows), shape * num_rows / rows[0])
        return float(self._level_s * shape)
