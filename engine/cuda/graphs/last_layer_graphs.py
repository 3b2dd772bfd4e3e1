"""The rest of a pass behind its last K and V.

For the newest token of each sequence whose logits are wanted: attention of the last layer, as of decodes, the rest of
it, and the head. Captured by batch: launched one by one it took the host 2.4 ms, all that a chunk of 64 rows takes the
device.
"""

from collections.abc import Sequence as SequenceOf
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.cuda.inputs.batch_inputs import PromptRows
from engine.cuda.inputs.buckets import batch_buckets, bucket_for
from engine.cuda.inputs.decode_state import DecodeState
from engine.cuda.kv.kv_cache import DeviceCache
from engine.cuda.model.attention import DeviceAttention
from engine.cuda.model.transformer import Transformer
from engine.cuda.runtime.graph_capture import HeldLaunches, Record
from engine.cuda.runtime.upload import copy_all


class LastLayerGraphs:
    """Padded by rows of one token. Launched as for the longest contexts: one layer gains little by less."""

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
        self._buckets = batch_buckets(state.max_rows)
        self._rows = torch.zeros(state.max_rows, dtype=torch.int64, device=cache.device)
        self._lengths = torch.ones(state.max_rows, dtype=torch.int32, device=cache.device)
        self._tables = torch.zeros_like(state.tables)
        self._held = HeldLaunches[int](lambda bucket: partial(self._compute, bucket))

    @property
    def sizes(self) -> SequenceOf[int]:
        """Batches."""
        return self._buckets[::-1]

    @torch.inference_mode()
    def capture(self, record: Record, sizes: SequenceOf[int]) -> None:
        """On sequences of one token."""
        self._lengths.fill_(1)
        for bucket in sizes:
            self._held.hold(record, bucket)

    def release(self) -> None:
        self._held.release()

    @torch.inference_mode()
    def compute(self, prompts: PromptRows, num_decodes: int) -> Tensor:
        """Return the logits that a pass samples from.

        Those of the pass's decodes, whose contexts `state` has, and of the prompts that sample: in `state`.
        """
        count = num_decodes + len(prompts.sampling)
        bucket = bucket_for(self._buckets, count)
        self._put(prompts, num_decodes, count, bucket)
        self._held.run(bucket)
        return self._state.logits[:count]

    def _put(self, prompts: PromptRows, num_decodes: int, count: int, bucket: int) -> None:
        state, queries, sampling = self._state, prompts.queries, prompts.sampling
        if num_decodes:
            self._lengths[:num_decodes].copy_(state.lengths[:num_decodes])
            self._tables[:num_decodes].copy_(state.tables[:num_decodes])
        rows = np.zeros(bucket, np.int64)
        rows[:count] = np.concatenate([np.arange(num_decodes), num_decodes + prompts.sample_rows])
        lengths = np.ones(bucket - num_decodes, np.int32)
        lengths[: len(sampling)] = queries.lengths[sampling]
        tables = queries.tables[sampling]
        copy_all(
            (rows, lengths, tables),
            (
                self._rows[:bucket],
                self._lengths[num_decodes:bucket],
                self._tables[num_decodes:count, : tables.shape[1]],
            ),
        )

    def _compute(self, bucket: int) -> None:
        attend = self._attention.of_decodes(self._tables[:bucket], self._lengths[:bucket], self._max_model_len)
        x = self._model.finish(self._rows[:bucket], self._cache, attend)
        self._state.logits[:bucket].copy_(self._model.head(x))
