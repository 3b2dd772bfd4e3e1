"""CUDA graphs, all of them before the first request."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Launch = Callable[[], None]
Record = Callable[[Launch], Launch]
"""What launches the same again: itself, or the replay of a graph of it."""


@contextmanager
def capturing() -> Iterator[Record]:
    """On a stream of its own; all graphs that are made within share what they allocate. What must be compiled or loaded
    for a launch was: it has been launched before.
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
