"""Text that the target writes: many sequences at once, on a GPU one captured graph a step.

Each slot feeds its sequence token by token, prompts too, so that there is one kind of step; a slot whose sequence ends
takes the next from the queue, all on the device. The host only counts.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.eagle3.target import TargetDecoder, TargetModel

STEPS_A_LOOK = 64
"""Steps between two looks of the host at the queue."""
MIN_P = 0.05
"""Sampled tokens are at least so likely, as a part of the likeliest."""


@dataclass(frozen=True)
class Request:
    """A sequence to go on with, greedily at temperature 0.

    `max_new`: tokens at most, the stop token included.
    """

    tokens: Sequence[int]
    temperature: float = 0.0
    max_new: int = 400


@dataclass(frozen=True)
class Written:
    """A sequence with what was written, from `start` on."""

    tokens: Tensor
    start: int


class Writer:
    """Writes sequences of up to `max_len` tokens, `num_slots` at a time."""

    def __init__(
        self, model: TargetModel, stop_ids: Sequence[int], num_slots: int, max_len: int, capacity: int, seed: int = 0
    ) -> None:
        """`capacity`: the most requests of one call of `write`."""
        device = model.device
        self._device, self._num_slots, self._max_len, self._capacity = device, num_slots, max_len, capacity
        self._decoder = TargetDecoder(model, num_slots, max_len)
        self._is_stop = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=device)
        self._is_stop[list(stop_ids)] = True
        self._filler = int(stop_ids[0])
        # The last row of each is that of a slot with nothing to do.
        self._tokens = torch.full((capacity + 1, max_len), self._filler, dtype=torch.int32, device=device)
        whole = {"dtype": torch.int32, "device": device}
        self._prompt_lens, self._limits, self._lengths = (torch.zeros(capacity + 1, **whole) for _ in range(3))
        self._temperatures = torch.zeros(capacity + 1, device=device)
        self._sequence = torch.full((num_slots,), capacity, dtype=torch.int64, device=device)
        self._positions, self._current = (torch.zeros(num_slots, **whole) for _ in range(2))
        self._next, self._count = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        torch.manual_seed(seed)
        self._replay = self._captured() if device.type == "cuda" else self._step

    def write(self, requests: Sequence[Request], budget_s: float = float("inf")) -> list[Written | None]:
        """Return what was written for each request.

        After `budget_s` as far as it came; None for what never began.
        """
        assert len(requests) <= self._capacity, f"{len(requests)} requests; there is room for {self._capacity}"
        self._load(requests)
        deadline = time.monotonic() + budget_s
        while time.monotonic() < deadline and not bool((self._sequence == self._capacity).all()):
            for _ in range(STEPS_A_LOOK):
                self._replay()
        busy = self._sequence < self._capacity
        self._lengths[self._sequence[busy]] = self._positions[busy] + 1
        lengths, tokens = self._lengths.tolist(), self._tokens[: len(requests)].cpu()
        return [
            Written(tokens[index, : lengths[index]].clone(), len(request.tokens))
            if lengths[index] > len(request.tokens)
            else None
            for index, request in enumerate(requests)
        ]

    def _load(self, requests: Sequence[Request]) -> None:
        count, filler = len(requests), [self._filler]
        starts = [list(request.tokens)[: self._max_len - 1] for request in requests]
        width = max(map(len, starts), default=0)
        table = torch.tensor([start + filler * (width - len(start)) for start in starts], dtype=torch.int32)
        self._tokens.fill_(self._filler)
        self._tokens[:count, :width] = table.view(count, width).to(self._device)
        self._lengths.zero_()
        self._prompt_lens[:count] = torch.tensor([len(start) for start in starts], dtype=torch.int32)
        limits = [len(start) + request.max_new for start, request in zip(starts, requests, strict=True)]
        self._limits[:count] = torch.tensor(limits, dtype=torch.int32).clamp(max=self._max_len)
        self._temperatures[:count] = torch.tensor([request.temperature for request in requests])
        self._prompt_lens[self._capacity], self._limits[self._capacity] = self._max_len, 2
        self._count.fill_(count)
        first = torch.arange(self._num_slots, device=self._device)
        self._sequence.copy_(torch.where(first < count, first, self._capacity))
        self._next.fill_(self._num_slots)
        self._positions.zero_()
        self._current.copy_(self._tokens[self._sequence, 0])

    def _step(self) -> None:
        """Feed each slot's token, and choose its next: the prompt's, or the model's."""
        sequence, following = self._sequence, self._positions + 1
        logits = self._decoder.step(self._current, self._positions)
        chosen = self._choose(logits, self._temperatures[sequence])
        is_forced = following < self._prompt_lens[sequence]
        chosen = torch.where(is_forced, self._tokens[sequence, following.long()], chosen.int())
        self._tokens[sequence, following.long()] = chosen
        is_done = (~is_forced & self._is_stop[chosen.long()]) | (following >= self._limits[sequence] - 1)
        self._lengths[sequence] = torch.where(is_done, following + 1, self._lengths[sequence])
        taken = self._next + is_done.cumsum(0) - 1
        taken = torch.where(taken < self._count, taken, self._capacity)
        self._next += is_done.sum()
        sequence = torch.where(is_done, taken, sequence)
        self._positions.copy_(torch.where(is_done, 0, following))
        self._current.copy_(torch.where(is_done, self._tokens[sequence, 0], chosen))
        self._sequence.copy_(sequence)

    def _choose(self, logits: Tensor, temperatures: Tensor) -> Tensor:
        """Return a token a row, drawn by Gumbel noise among those that are likely enough."""
        logits = logits.float()
        floor = logits.amax(-1, keepdim=True) + temperatures[:, None] * math.log(MIN_P)
        noise = -torch.empty_like(logits).exponential_().log()
        return (logits + temperatures[:, None] * noise).masked_fill(logits < floor, float("-inf")).argmax(-1)

    def _captured(self) -> Callable[[], None]:
        """Return a replay of one step as a CUDA graph."""
        self._load([Request([self._filler] * 4, max_new=4)] * min(4, self._capacity))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay
