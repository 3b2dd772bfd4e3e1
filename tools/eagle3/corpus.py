"""The written text on the device, in batches of sequences of about one length."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.eagle3.generation import Written

STEP = 32
"""Batches are padded to a multiple of so many tokens, so that few shapes occur."""


@dataclass(frozen=True)
class TextBatch:
    """Sequences `[B, T]`, padded at their ends.

    `lengths` `[B]`; `starts` `[B]`: where the model's own text begins.
    """

    tokens: Tensor
    lengths: Tensor
    starts: Tensor

    def predicted(self) -> Tensor:
        """Return the flat indexes of rows after which the target chose a token that a draft could have said.

        The token that follows row q; a draft begins after the first token that was written, so q is one of these.
        """
        place = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        is_own = (place >= self.starts[:, None]) & (place < self.lengths[:, None] - 1)
        return is_own.flatten().nonzero()[:, 0]

    def first_drafts(self, flat: Tensor) -> Tensor:
        """Return how many drafts deep the token after each row can be, 0 for the first draft."""
        length = self.tokens.shape[1]
        return flat % length - self.starts[flat // length]


class Corpus:
    """Sequences of at least four tokens, of which some are the model's."""

    def __init__(self, texts: Sequence[Written], device: torch.device) -> None:
        kept = [text for text in texts if len(text.tokens) > max(text.start + 1, 4)]
        self._lengths = [len(text.tokens) for text in kept]
        self._starts = [text.start for text in kept]
        flat = torch.cat([text.tokens for text in kept]) if kept else torch.zeros(0, dtype=torch.int32)
        self._flat = flat.int().to(device)
        self._firsts = [0]
        for length in self._lengths:
            self._firsts.append(self._firsts[-1] + length)
        self._device = device

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        return self._firsts[-1]

    @property
    def num_written(self) -> int:
        """The tokens that the model wrote."""
        return self.num_tokens - sum(self._starts)

    def frequent(self, count: int, vocab_size: int) -> Tensor:
        """Return the `count` tokens that the model wrote most often, ascending."""
        return torch.bincount(self._written(), minlength=vocab_size).topk(count).indices.sort().values

    def share_of(self, drafted: Tensor) -> float:
        """Return the part of what the model wrote that is one of these tokens."""
        return torch.isin(self._written(), drafted).float().mean().item()

    def _written(self) -> Tensor:
        """Return all tokens that the model wrote, one after the other."""
        place = torch.arange(self.num_tokens, device=self._device)
        firsts, lengths, starts = (
            torch.tensor(each, device=self._device) for each in (self._firsts[:-1], self._lengths, self._starts)
        )
        return self._flat[place >= torch.repeat_interleave(firsts + starts, lengths)].long()

    def batches(self, num_tokens: int, seed: int) -> Iterator[TextBatch]:
        """Yield all sequences once, in an order that the seed draws, about `num_tokens` a batch with padding."""
        draw = random.Random(seed)
        order = sorted(range(len(self)), key=lambda index: self._lengths[index] + draw.uniform(0, STEP))
        groups: list[list[int]] = [[]]
        for index in order:
            longest = max(self._lengths[index], max((self._lengths[i] for i in groups[-1][-1:]), default=0))
            if (len(groups[-1]) + 1) * _padded(longest + STEP) > num_tokens and groups[-1]:
                groups.append([])
            groups[-1].append(index)
        draw.shuffle(groups)
        for group in groups:
            if group:
                yield self.batch(group)

    def batch(self, indexes: Sequence[int]) -> TextBatch:
        lengths = torch.tensor([self._lengths[index] for index in indexes], device=self._device)
        firsts = torch.tensor([self._firsts[index] for index in indexes], device=self._device)
        starts = torch.tensor([self._starts[index] for index in indexes], device=self._device)
        place = torch.arange(_padded(max(self._lengths[index] for index in indexes)), device=self._device)
        inside = torch.minimum(place[None], lengths[:, None] - 1)
        return TextBatch(self._flat[firsts[:, None] + inside].long(), lengths, starts)


def _padded(length: int) -> int:
    return -(-length // STEP) * STEP
