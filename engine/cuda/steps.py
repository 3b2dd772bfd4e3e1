"""Decode steps by batch and context, and the draws behind them: computed op by op, or captured once and replayed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from engine.cuda.capture import captured
from engine.cuda.drawing import Drawer
from engine.cuda.inputs import batch_buckets, bucket_for, context_buckets
from engine.cuda.state import DecodeState

Step = Callable[[], None]
"""Reads a DecodeState and writes its logits, or its tokens."""
MakeStep = Callable[[int, int], Step]
"""(rows, longest context) -> what writes the logits of the first rows."""


@dataclass(frozen=True)
class StepKey:
    num_rows: int
    max_len: int
    greedy: bool


class DecodeSteps:
    """Once `capture` is called: as CUDA graphs, all of them before the first request; what they allocate they share. A
    draw has a graph of its own, since adjusted logits are not the step's: one more launch, which the GPU waits for
    some microseconds.
    """

    def __init__(self, make: MakeStep, drawer: Drawer, state: DecodeState, max_model_len: int) -> None:
        self._make, self._drawer, self._state = make, drawer, state
        self._batches, self._contexts = batch_buckets(state.max_rows), context_buckets(max_model_len)
        self._computes: dict[tuple[int, int], Step] = {}
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._draws: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def key(self, num_rows: int, max_len: int, greedy: bool) -> StepKey:
        return StepKey(bucket_for(self._batches, num_rows), bucket_for(self._contexts, max_len), greedy)

    def graph(self, num_rows: int, max_len: int) -> torch.cuda.CUDAGraph:
        """The captured step up to its logits, for measuring. Raises KeyError if it was not captured."""
        key = self.key(num_rows, max_len, greedy=True)
        return self._graphs[key.num_rows, key.max_len]

    @torch.inference_mode()
    def run_all(self) -> None:
        """Each once, not captured, on sequences of one token."""
        self._state.lengths.fill_(1)
        for rows, max_len in self._sizes():
            self._step(rows, max_len)()
        for rows, greedy in self._kinds():
            self._draw(rows, greedy)

    @torch.inference_mode()
    def capture(self) -> None:
        """The largest first, so that the smaller find the memory they share."""
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._state.lengths.fill_(1)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for rows, max_len in self._sizes():
                step = self._step(rows, max_len)
                step()  # compiles what must be compiled, outside of the capture
                self._graphs[rows, max_len] = captured(step, pool)
            for rows, greedy in self._kinds():
                draw = partial(self._draw, rows, greedy)
                draw()
                self._draws[rows, greedy] = captured(draw, pool)
        torch.cuda.synchronize()

    def release(self) -> None:
        """Nothing is captured from now on."""
        self._graphs.clear()
        self._draws.clear()

    @torch.inference_mode()
    def draw(self, key: StepKey) -> None:
        """Logits and tokens of the first `key.num_rows` rows."""
        self.compute(key)
        graph = self._draws.get((key.num_rows, key.greedy))
        if graph is not None:
            graph.replay()
        else:
            self._draw(key.num_rows, key.greedy)

    @torch.inference_mode()
    def compute(self, key: StepKey) -> None:
        """Logits alone; the tokens of the step before stay where they are."""
        graph = self._graphs.get((key.num_rows, key.max_len))
        if graph is not None:
            graph.replay()
        else:
            self._step(key.num_rows, key.max_len)()

    def _draw(self, rows: int, greedy: bool) -> None:
        self._drawer.into(self._state, self._state.logits[:rows], 0, greedy)

    def _step(self, rows: int, max_len: int) -> Step:
        size = (rows, max_len)
        if size not in self._computes:
            self._computes[size] = self._make(*size)
        return self._computes[size]

    def _sizes(self) -> Iterator[tuple[int, int]]:
        for rows in reversed(self._batches):
            for max_len in self._contexts:
                yield rows, max_len

    def _kinds(self) -> Iterator[tuple[int, bool]]:
        for rows in reversed(self._batches):
            yield rows, True
            yield rows, False
