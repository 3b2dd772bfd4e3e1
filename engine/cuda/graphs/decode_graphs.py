"""Decode steps by batch and context, and the draws behind them.

Computed op by op, or captured once and replayed.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import product

import torch

from engine.cuda.device_sampler import SamplingKernel
from engine.cuda.inputs.batch_inputs import StepKey
from engine.cuda.inputs.buckets import batch_buckets, bucket_for, context_buckets
from engine.cuda.inputs.decode_state import DecodeState
from engine.cuda.runtime.graph_capture import HeldLaunches, Launch, Record

MakeStep = Callable[[int, int], Launch]
"""(rows, longest context) -> what writes the logits of the first rows."""


class DecodeGraphs:
    """A draw is held by itself, since adjusted logits are not the step's.

    One more launch, which the GPU waits for some microseconds.
    """

    def __init__(self, make: MakeStep, drawer: SamplingKernel, state: DecodeState, max_model_len: int) -> None:
        self._make, self._sampling_kernel, self._state = make, drawer, state
        self._batches, self._contexts = batch_buckets(state.max_rows), context_buckets(max_model_len)
        self._computes: dict[tuple[int, int], Launch] = {}
        self._held = HeldLaunches[tuple[int, int]](self._step)
        self._draws = HeldLaunches[tuple[int, bool]](lambda kind: partial(self._sample, *kind))

    def key(self, num_rows: int, max_len: int, greedy: bool) -> StepKey:
        return StepKey(bucket_for(self._batches, num_rows), bucket_for(self._contexts, max_len), greedy)

    def held(self, num_rows: int, max_len: int) -> Launch:
        """The step up to its logits, for measuring. Raises KeyError if it is not held."""
        key = self.key(num_rows, max_len, greedy=True)
        return self._held[key.num_rows, key.max_len]

    @property
    def sizes(self) -> SequenceOf[tuple[int, int]]:
        """Batches and contexts."""
        return list(product(reversed(self._batches), self._contexts))

    @torch.inference_mode()
    def capture(self, record: Record, sizes: SequenceOf[tuple[int, int]]) -> None:
        """On sequences of one token."""
        self._state.lengths.fill_(1)
        for size in sizes:
            self._held.hold(record, size)
            for greedy in (True, False):
                if (kind := (size[0], greedy)) not in self._draws:
                    self._draws.hold(record, kind)

    def release(self) -> None:
        self._held.release()
        self._draws.release()

    @torch.inference_mode()
    def sample(self, key: StepKey) -> None:
        """Logits and tokens of the first `key.num_rows` rows."""
        self.compute(key)
        self.draw_from(key.num_rows, key.greedy)

    @torch.inference_mode()
    def draw_from(self, num_rows: int, greedy: bool) -> None:
        """Tokens of the first rows, padded, from the state's logits."""
        self._draws.run((bucket_for(self._batches, num_rows), greedy))

    @torch.inference_mode()
    def compute(self, key: StepKey) -> None:
        """Logits alone; the tokens of the step before stay where they are."""
        self._held.run((key.num_rows, key.max_len))

    def _sample(self, rows: int, greedy: bool) -> None:
        self._sampling_kernel.into(self._state, self._state.logits[:rows], greedy)

    def _step(self, size: tuple[int, int]) -> Launch:
        if size not in self._computes:
            self._computes[size] = self._make(*size)
        return self._computes[size]
