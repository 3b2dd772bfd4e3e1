"""Timing on a device.

CUDA graphs replayed between events, medians, and operands in turn so that L2 does not help.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch


def capture(run: Callable[[], Any], warmups: int = 2) -> torch.cuda.CUDAGraph:
    """A graph of one call; the warm-up compiles what must be compiled, outside of the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, count: int = 10, groups: int = 5) -> float:
    """Median over groups of the mean time of one replay, ms."""
    for _ in range(2):
        graph.replay()
    return statistics.median(_span_ms(graph.replay, count) for _ in range(groups))


def call_us(calls: Sequence[Callable[[], Any]], count: int = 4, groups: int = 5) -> float:
    """Microseconds of one call when all of `calls` (the same work on different operands) run in one graph.

    The graph holds 32 launches or more: the gap between replays is several microseconds and would be counted.
    """
    launches = list(calls) * -(-32 // len(calls))

    def run() -> None:
        for call in launches:
            call()

    return replay_ms(capture(run), count, groups) * 1e3 / len(launches)


def eager_us(call: Callable[[], Any], count: int = 10, groups: int = 5) -> float:
    """Microseconds of a call that cannot be captured."""
    call()
    return statistics.median(_span_ms(call, count) for _ in range(groups)) * 1e3


def copy_rate(nbytes: int = 1 << 32) -> float:
    """Bytes read plus written per second by a device-to-device copy."""
    src = torch.randn(nbytes // 4, device="cuda")
    dst = torch.empty_like(src)
    return 2 * nbytes / (eager_us(lambda: dst.copy_(src)) * 1e-6)


def _span_ms(run: Callable[[], Any], count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count
