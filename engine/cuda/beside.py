"""Attention of the decodes beside prompts, captured layer by layer: launched one by one it took the host 4 ms of a
step, as long as the device takes for a chunk of 128 rows with all that it does there.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from engine.cuda.attention import DeviceAttention
from engine.cuda.cache import DeviceCache, LayerCache
from engine.cuda.capture import Launch, capturing
from engine.cuda.inputs import batch_buckets, bucket_for, context_buckets
from engine.cuda.state import DecodeState
from engine.cuda.steps import StepKey
from engine.cuda.transformer import Asked, Attend, Transformer
from engine.cuda.weights import Sight


class DecodesBeside:
    """By batch and context. The shortest and the longest class do for all: those between are launched alike."""

    def __init__(
        self,
        model: Transformer,
        attention: DeviceAttention,
        cache: DeviceCache,
        state: DecodeState,
        max_model_len: int,
    ) -> None:
        self._model, self._attention, self._cache, self._state = model, attention, cache, state
        contexts = context_buckets(max_model_len)
        self._contexts = sorted({contexts[0], contexts[-1]})
        self._held: dict[tuple[int, int], list[Launch]] = {}

    @torch.inference_mode()
    def run_all(self) -> None:
        """Each once, not captured, on sequences of one token."""
        self.hold(lambda launch: launch)
        self.release()

    def capture(self) -> None:
        """As CUDA graphs, before the first request."""
        with capturing() as record:
            self.hold(record)

    @torch.inference_mode()
    def hold(self, record: Callable[[Launch], Launch]) -> None:
        """Nothing of attention in segments, whose tables each step cuts anew."""
        self._state.lengths.fill_(1)
        for size in self._sizes():
            launches = self._launches(*size)
            for launch in launches:
                launch()  # loads what must be loaded, outside of a capture
            if not self._attention.is_cut:
                self._held[size] = [record(launch) for launch in launches]

    def release(self) -> None:
        """Nothing is held from now on."""
        self._held.clear()

    def attend(self, key: StepKey) -> Attend:
        """Of the first rows of a call of the model, where they are: also of those that go past the last layer's K and
        V, whose copies say the same.
        """
        size = key.num_rows, bucket_for(self._contexts, key.max_len)
        held = self._held.get(size)
        if held is None:
            return self._attend(*size)

        def replay(asked: Asked, cache: LayerCache, out: Tensor, sight: Sight) -> None:
            held[cache.index]()

        return replay

    def _attend(self, rows: int, max_len: int) -> Attend:
        return self._attention.of_decodes(self._state.tables[:rows], self._state.lengths[:rows], max_len)

    def _launches(self, rows: int, max_len: int) -> list[Launch]:
        attend = self._attend(rows, max_len)
        layers = range(self._model.num_layers)
        return [partial(self._model.attend, rows, self._cache, index, attend) for index in layers]

    def _sizes(self) -> Iterator[tuple[int, int]]:
        for rows in reversed(batch_buckets(self._state.max_rows)):
            for max_len in self._contexts:
                yield rows, max_len
