"""What captured launches take of a GPU's memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest

from engine.cuda.capture import Record, expected_nbytes

MIB = 1 << 20


class _Held:
    """Of each size two launches, which take so many bytes of what is `free`."""

    def __init__(self, sizes: Sequence[int], first: int, each: int, free: int) -> None:
        self.sizes, self.free, self.held = sizes, free, []
        self._first, self._each = first, each

    def hold(self, record: Record, sizes: Sequence[int]) -> None:
        for size in sizes:
            self.free -= self._each + (0 if self.held else self._first)
            self.held.append([record(partial(self.held.append, size)) for _ in range(2)])

    def release(self) -> None:
        self.held.clear()


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 200])
def test_what_graphs_take_is_told_by_a_few_of_them(count):
    recorded = []

    @contextmanager
    def capturing() -> Iterator[Record]:
        yield lambda launch: recorded.append(launch) or launch

    holder = _Held(range(count), first=144 * MIB, each=5 * MIB, free=10_000 * MIB)
    expected = expected_nbytes(holder, capturing, lambda: holder.free)
    took = (144 + 5 * count) * MIB if count else 0
    assert took <= expected <= took + count * MIB
    assert len(recorded) == 2 * min(count, 7) and not holder.held
