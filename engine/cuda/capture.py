"""CUDA graphs, all of them before the first request."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Launch = Callable[[], None]


def captured(launch: Launch, pool: Any) -> torch.cuda.CUDAGraph:
    """On the current stream, which is not the default one; what it allocates it shares with all of `pool`. What must be
    compiled or loaded for it was: it has been launched before.
    """
    # Not torch.cuda.graph, which collects garbage and empties the allocator's cache each time.
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool)
    launch()
    graph.capture_end()
    return graph


@contextmanager
def capturing() -> Iterator[Callable[[Launch], Launch]]:
    """What makes a graph of a launch; all that are made within share what they allocate."""
    pool = torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield lambda launch: captured(launch, pool).replay
    torch.cuda.synchronize()
