"""Decode steps of a model whose step is not fused."""

import torch

from engine.cuda.inputs.decode_state import DecodeState
from engine.cuda.kv.kv_cache import DeviceCache
from engine.cuda.model.attention import DeviceAttention
from engine.cuda.model.forward_inputs import Rows
from engine.cuda.model.transformer import Transformer
from engine.cuda.runtime.graph_capture import Launch


class PlainSteps:
    """The steps of a Transformer, over its cache."""

    def __init__(self, model: Transformer, attention: DeviceAttention, cache: DeviceCache, state: DecodeState) -> None:
        self._model, self._attention, self._cache, self._state = model, attention, cache, state

    def step(self, rows: int, max_len: int) -> Launch:
        """Return what writes the logits of the first rows; see decode_graphs.MakeStep."""
        state = self._state
        num_rows = torch.full((1,), rows, dtype=torch.int32, device=state.device)

        def step() -> None:
            attend = self._attention.of_decodes(state.tables[:rows], state.lengths[:rows], max_len)
            inputs = Rows(state.gather_tokens(rows), state.positions[:rows], state.slots[:rows], num_rows)
            state.logits[:rows].copy_(self._model.head(self._model(inputs, self._cache, attend)))

        return step
