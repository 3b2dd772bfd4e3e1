"""CUDA graphs, all of them before the first request."""

from collections.abc import Callable
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
