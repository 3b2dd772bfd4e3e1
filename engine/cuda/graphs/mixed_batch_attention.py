"""Attention of the decodes beside prompts, captured layer by layer.

Launched one by one it took the host 4 ms of a step, as long as the device takes for a chunk of 128 rows with all that
it does there.
"""

from collections.abc import Sequence as SequenceOf
from functools import partial

import torch

from engine.cuda.inputs.batch_inputs import StepKey
from engine.cuda.inputs.buckets import batch_buckets
from engine.cuda.inputs.decode_state import DecodeState
from engine.cuda.kv.kv_cache import DeviceCache
from engine.cuda.model.attention import DeviceAttention
from engine.cuda.model.forward_inputs import Attend
from engine.cuda.model.transformer import Transformer
from engine.cuda.runtime.graph_capture import Launch, Record


class MixedBatchAttention:
    """The attention of answers in a pass with prompts, by batch, padded.

    What it writes to rows behind its own is overwritten by the prompts' attention. Launched as for the longest
    contexts: what is tuned for shorter ones would take 0.1 to 0.4 ms off a gap of 17, and took two seconds of each
    start to capture (H200).
    """

    def __init__(
        self,
        model: Transformer,
        attention: DeviceAttention,
        cache: DeviceCache,
        state: DecodeState,
        max_model_len: int,
    ) -> None:
        self._model, self._attention, self._cache, self._state = model, attention, cache, state
        self._max_model_len = max_model_len
        self._held: dict[int, list[Launch]] = {}

    @property
    def sizes(self) -> SequenceOf[int]:
        """Batches."""
        return batch_buckets(self._state.max_rows)[::-1]

    @torch.inference_mode()
    def capture(self, record: Record, sizes: SequenceOf[int]) -> None:
        """On sequences of one token.

        Attention in segments, whose tables each step cuts anew, is launched, not held.
        """
        self._state.lengths.fill_(1)
        for rows in sizes:
            launches = self._launches(rows)
            if self._attention.is_cut:
                for launch in launches:
                    launch()
            else:
                self._held[rows] = [record(launch) for launch in launches]

    def release(self) -> None:
        self._held.clear()

    def attend(self, key: StepKey) -> Attend:
        """Return the attention of the first rows of a pass, where they are, up to the last layer's K and V.

        To be called before the attention of the rows behind them.
        """
        rows = key.num_rows
        held = self._held.get(rows)
        if held is not None:
            return lambda asked, cache, out, sight: held[cache.index]()
        eager = self._attend(rows)
        return lambda asked, cache, out, sight: self._model.attend(rows, self._cache, cache.index, eager)

    def _attend(self, rows: int) -> Attend:
        return self._attention.of_decodes(self._state.tables[:rows], self._state.lengths[:rows], self._max_model_len)

    def _launches(self, rows: int) -> list[Launch]:
        attend = self._attend(rows)
        layers = range(self._model.num_layers - 1)  # the last one's is in engine.cuda.graphs.last_layer_graphs
        return [partial(self._model.attend, rows, self._cache, index, attend) for index in layers]
