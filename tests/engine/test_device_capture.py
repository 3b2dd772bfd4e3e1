"""What captured launches take of a GPU's memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest

from engine.cuda.runtime.graph_capture import Record, expected_nbytes

MIB = 1 << 20


class _Gpu:
    """Memory that is given back is taken again before any that is free."""

    def __init__(self) -> None:
        self.free, self._spare = 10_000 * MIB, 0

    def take(self, nbytes: int) -> None:
        again = min(nbytes, self._spare)
        self._spare -= again
        self.free -= nbytes - again

    def give_back(self, nbytes: int) -> None:
        self._spare += nbytes


class _Held:
    """Two launches of each size, of `each` bytes; the first one has `first` more."""

    def __init__(self, gpu: _Gpu, sizes: Sequence[int], first: int, each: int) -> None:
        self.sizes, self.held = sizes, []
        self._gpu, self._first, self._each, self._taken = gpu, first, each, 0

    def capture(self, record: Record, sizes: Sequence[int]) -> None:
        for size in sizes:
            nbytes = self._each + (0 if self.held else self._first)
            self._gpu.take(nbytes)
            self._taken += nbytes
            self.held.append([record(partial(self.held.append, size)) for _ in range(2)])

    def release(self) -> None:
        self.held.clear()
        self._gpu.give_back(self._taken)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 200])
def test_what_graphs_take_is_told_by_a_few_of_them(count):
    recorded = []

    @contextmanager
    def capturing() -> Iterator[Record]:
        yield lambda launch: recorded.append(launch) or launch

    gpu = _Gpu()
    holders = [_Held(gpu, range(count), 144 * MIB, 5 * MIB), _Held(gpu, range(20), 0, 7 * MIB)]
    expected = expected_nbytes(holders, capturing, lambda: gpu.free)
    took = (144 + 5 * count) * MIB * (count > 0) + 20 * 7 * MIB
    assert took <= expected <= took + (count + 20) * MIB
    assert len(recorded) == 2 * min(count, 7) + 2 * 7
    assert not any(holder.held for holder in holders)
