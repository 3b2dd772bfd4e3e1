"""Chunks of prompts, captured.

What lies between the attentions of two layers, captured once for a few numbers of rows.

Launched one by one, a chunk of an 8B model took 15 ms of the host, which is more than 1024 rows take of an H200.
Attention stays outside: how it is launched depends on the lengths of the sequences, and not only on the rows.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial

import torch

from engine.cuda.graphs.prefill_rows import PrefillRows
from engine.cuda.inputs.buckets import bucket_for, chunk_buckets
from engine.cuda.kv.kv_cache import DeviceCache
from engine.cuda.model.forward_inputs import Advance
from engine.cuda.model.transformer import Transformer
from engine.cuda.runtime.graph_capture import Launch, Record

_SLOWER = 1.05  # beyond what times differ by themselves


class PrefillGraphs:
    """The layers of a prompt's chunk, captured for `rows`, at most `max_rows` of a batch.

    Nothing is held for more than what keeps the device busy anyway.
    """

    def __init__(self, model: Transformer, cache: DeviceCache, rows: PrefillRows, max_rows: int) -> None:
        self._model, self._cache, self._rows = model, cache, rows
        self._buckets = chunk_buckets(max_rows)
        self._held: dict[int, list[Launch]] = {}

    @property
    def sizes(self) -> SequenceOf[int]:
        """Numbers of rows."""
        return self._buckets[::-1]

    @property
    def most_rows(self) -> int:
        """More are launched op by op."""
        return self._buckets[-1]

    @torch.inference_mode()
    def capture(self, record: Record, sizes: SequenceOf[int]) -> None:
        layers = range(self._model.num_layers)
        for bucket in sizes:
            rows = self._rows.first(bucket)
            self._held[bucket] = [record(partial(self._model.advance, rows, self._cache, index)) for index in layers]

    def leave_out_slow(self, time: Callable[[Launch], float]) -> None:
        """Pad rows further where that is faster.

        CuBLAS takes 141 us for 448 rows of 28672 x 4096 and 85 for 512 (H200). `time`: what a launch takes, in any
        unit.
        """
        fastest = math.inf
        for bucket in reversed(self._buckets):
            taken = time(self._held[bucket][-1])
            if taken > _SLOWER * fastest:
                del self._held[bucket]
            fastest = min(fastest, taken)
        self._buckets = tuple(sorted(self._held))

    def release(self) -> None:
        self._held.clear()

    @torch.inference_mode()
    def advance(self, count: int) -> Advance | None:
        """Transformer.advance for the first `count` rows by what is held; None if nothing is for as many."""
        if not self._held or count > self.most_rows:
            return None
        bucket = bucket_for(self._buckets, count)
        self._rows.pad(count, bucket)
        held = self._held[bucket]
        return lambda index: held[index]()
