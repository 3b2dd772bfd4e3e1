"""Decode steps by batch and context: computed op by op, or captured once and replayed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.cuda.drawing import Drawer
from engine.cuda.inputs import batch_buckets, bucket_for, context_buckets
from engine.cuda.state import DecodeState

Step = Callable[[], None]
"""Reads a DecodeState and writes its logits, or its tokens too."""
MakeStep = Callable[[int, int], Step]
"""(rows, longest context) -> what writes the logits of the first rows."""


@dataclass(frozen=True)
class StepKey:
    num_rows: int
    max_len: int
    greedy: bool


class DecodeSteps:
    """Once `capture` is called: as CUDA graphs, all of them before the first request; what they allocate they share."""

    def __init__(self, make: MakeStep, drawer: Drawer, state: DecodeState, max_model_len: int) -> None:
        self._make, self._drawer, self._state = make, drawer, state
        self._batches, self._contexts = batch_buckets(state.max_rows), context_buckets(max_model_len)
        self._computes: dict[tuple[int, int], Step] = {}
        self._graphs: dict[StepKey, torch.cuda.CUDAGraph] = {}

    def key(self, num_rows: int, max_len: int, greedy: bool) -> StepKey:
        return StepKey(bucket_for(self._batches, num_rows), bucket_for(self._contexts, max_len), greedy)

    def graph(self, num_rows: int, max_len: int) -> torch.cuda.CUDAGraph:
        """The captured greedy step, for measuring. Raises KeyError if it was not captured."""
        return self._graphs[self.key(num_rows, max_len, greedy=True)]

    @torch.inference_mode()
    def run_all(self) -> None:
        """Each once, not captured, on sequences of one token."""
        self._state.lengths.fill_(1)
        for key in self._keys():
            self._run(key)

    @torch.inference_mode()
    def capture(self) -> None:
        """The largest first, so that the smaller find the memory they share."""
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._state.lengths.fill_(1)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for key in self._keys():
                self._run(key)  # compiles what must be compiled, outside of the capture
                # Not torch.cuda.graph, which collects garbage and empties the allocator's cache each time.
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool)
                self._run(key)
                graph.capture_end()
                self._graphs[key] = graph
        torch.cuda.synchronize()

    def release(self) -> None:
        """Nothing is captured from now on."""
        self._graphs.clear()

    @torch.inference_mode()
    def draw(self, key: StepKey) -> None:
        """Logits and tokens of the first `key.num_rows` rows."""
        if key in self._graphs:
            self._graphs[key].replay()
        else:
            self._run(key)

    @torch.inference_mode()
    def compute(self, key: StepKey) -> None:
        """Logits alone; the tokens of the step before stay where they are."""
        self._compute(key)()

    def _run(self, key: StepKey) -> None:
        self.compute(key)
        self._drawer.into(self._state, self._state.logits[: key.num_rows], 0, key.greedy)

    def _compute(self, key: StepKey) -> Step:
        size = (key.num_rows, key.max_len)
        if size not in self._computes:
            self._computes[size] = self._make(*size)
        return self._computes[size]

    def _keys(self) -> Iterator[StepKey]:
        for rows in reversed(self._batches):
            for max_len in self._contexts:
                yield StepKey(rows, max_len, greedy=True)
                yield StepKey(rows, max_len, greedy=False)
