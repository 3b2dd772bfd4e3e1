"""The rows of a pass of prompts and of answers, at addresses that captured chunks keep."""

import torch

from engine.cuda.inputs.batch_inputs import PromptRows
from engine.cuda.inputs.decode_state import DecodeState
from engine.cuda.model.forward_inputs import Rows
from engine.cuda.runtime.upload import copy_all


class PrefillRows:
    """Room for `max_rows`."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._token_ids, self._positions = (torch.zeros(max_rows, dtype=torch.int32, device=device) for _ in range(2))
        self._slots = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self._num_decodes = torch.zeros(1, dtype=torch.int32, device=device)

    def first(self, count: int) -> Rows:
        """Return so many rows, whatever they are."""
        return Rows(self._token_ids[:count], self._positions[:count], self._slots[:count], self._num_decodes)

    def put(self, prompts: PromptRows, state: DecodeState, num_decodes: int) -> Rows:
        """Answers as `state` has them, prompts behind them."""
        count = num_decodes + len(prompts.token_ids)
        if num_decodes:
            self._token_ids[:num_decodes].copy_(state.gather_tokens(num_decodes))
            self._positions[:num_decodes].copy_(state.positions[:num_decodes])
            self._slots[:num_decodes].copy_(state.slots[:num_decodes])
        self._num_decodes.fill_(num_decodes)
        rooms = [room[num_decodes:count] for room in (self._token_ids, self._positions, self._slots)]
        copy_all((prompts.token_ids, prompts.positions, prompts.slots), rooms)
        return self.first(count)

    def pad(self, count: int, padded: int) -> None:
        """Rows from `count` to `padded` write nothing to the cache."""
        if count < padded:
            self._slots[count:padded].fill_(-1)
