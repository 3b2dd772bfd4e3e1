"""CUDA graphs, all of them before the first request."""

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch

Size = TypeVar("Size")
Launch = Callable[[], None]
Record = Callable[[Launch], Launch]
"""What launches the same again: itself, or the replay of a graph of it."""

_SAMPLED = 6
# The driver takes memory in pages of so much, and what lies on a page that was begun shows nowhere.
_PAGE_NBYTES = 2 << 20


class GraphSet(Protocol):
    """Launches by size."""

    @property
    def sizes(self) -> SequenceOf[Any]:
        """All that batches may ask for, the largest first, so that the smaller find the memory they share."""
        ...

    def capture(self, record: Record, sizes: SequenceOf[Any]) -> None:
        """What `record` makes of the launches of these."""
        ...

    def release(self) -> None:
        """Nothing is held from now on."""
        ...


class HeldLaunches(Generic[Size]):
    """Launches by size: those that were recorded, and else what `launch_of` gives for a size."""

    def __init__(self, launch_of: Callable[[Size], Launch]) -> None:
        self._launch_of = launch_of
        self._held: dict[Size, Launch] = {}

    def __contains__(self, size: Size) -> bool:
        return size in self._held

    def __getitem__(self, size: Size) -> Launch:
        """Return what was recorded. Raises KeyError if nothing was."""
        return self._held[size]

    def hold(self, record: Record, size: Size) -> None:
        self._held[size] = record(self._launch_of(size))

    def release(self) -> None:
        self._held.clear()

    def run(self, size: Size) -> None:
        (self._held.get(size) or self._launch_of(size))()


@contextmanager
def capturing() -> Iterator[Record]:
    """On a stream of its own; all graphs that are made within share what they allocate.

    What must be compiled or loaded for a launch was: it has been launched before.
    """
    pool = torch.cuda.graph_pool_handle()

    def captured(launch: Launch) -> Launch:
        # Not torch.cuda.graph, which collects garbage and empties the allocator's cache each time.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool)
        launch()
        graph.capture_end()
        return graph.replay

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield captured
    torch.cuda.synchronize()


def free_nbytes() -> int:
    """Return how much of the GPU's memory is free when what was launched is done."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def expected_nbytes(
    holders: SequenceOf[GraphSet],
    capturing: Callable[[], AbstractContextManager[Record]],
    free_nbytes: Callable[[], int],
) -> int:
    """What all sizes of all holders will take of the device's memory, by what a few of each take.

    Nothing is held afterwards.

    A graph takes 0.1 to 2 MiB of the driver's, as many kernels as it has and whether NCCL's calls are among them, and
    the largest what all share. What was given back is not seen when the next take it: so all is kept to the end.
    """
    total = 0
    for holder in holders:
        few = holder.sizes[: 1 + _SAMPLED]
        left = [free_nbytes()]
        with capturing() as record:
            for sizes in (few[:1], few[1:]):
                holder.capture(record, sizes)
                left.append(free_nbytes())
        total += left[0] - left[1]
        if len(few) > 1:
            each = (left[1] - left[2] + _PAGE_NBYTES) / (len(few) - 1)
            total += math.ceil(each * (len(holder.sizes) - 1))
    for holder in holders:
        holder.release()
    return total
