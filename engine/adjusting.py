"""Logits as requests want them changed before a token is drawn, for any device: the host works out which of a batch's
logits change and how, then a few operations of torch do it where the logits are.

The order is that of vLLM and of OpenAI's documentation: logit_bias, penalties, min_tokens, bad_words, allowed tokens,
grammar.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contracts.sampling import SamplingParams
from engine.sequence import Sequence

Put = Callable[[SequenceOf[np.ndarray]], SequenceOf[Tensor]]
"""Copies of arrays where the logits are."""


class Seen:
    """The tokens of a sequence from `first` on, each once: `ids` `[n]` int64, and in `counts` `[n]` how often the
    answer has it. A token is counted once, whenever `follow` meets it: a step has one, a prompt thousands.
    """

    def __init__(self, tokens: np.ndarray, first: int, answer_start: int) -> None:
        ids = np.unique(tokens[first:]).astype(np.int64)
        self._room_ids, self._room_counts = ids, np.zeros(len(ids))
        self._places = {token: place for place, token in enumerate(ids.tolist())}
        self._num_followed = answer_start
        self.follow(tokens)

    @property
    def ids(self) -> np.ndarray:
        return self._room_ids[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        return self._room_counts[: len(self._places)]

    def follow(self, tokens: np.ndarray) -> None:
        """`tokens`: all of the sequence, prompt and answer."""
        for token in tokens[self._num_followed :].tolist():
            place = self._place(token)  # first, since it may make room
            self._room_counts[place] += 1
        self._num_followed = len(tokens)

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._room_ids):
            room = max(64, 2 * place)
            self._room_ids = np.resize(self._room_ids, room)
            self._room_counts = np.append(self._room_counts, np.zeros(room - place))
        self._room_ids[place] = token
        return place


class Wishes:
    """One sequence's, kept from token to token: what does not change is worked out once."""

    def __init__(self, sampling: SamplingParams, vocab: int, stop_ids: SequenceOf[int]) -> None:
        self._sampling, self._vocab = sampling, vocab
        biases = {token: bias for token, bias in sampling.logit_bias.items() if 0 <= token < vocab}
        self.biased = np.fromiter(biases.keys(), np.int64, len(biases))
        self.biases = np.fromiter(biases.values(), np.float32, len(biases))
        # A tokenizer may know more than its model.
        self._stops = np.array([token for token in stop_ids if 0 <= token < vocab], np.int64)
        self._single = np.array([w[0] for w in sampling.bad_words if len(w) == 1 and w[0] < vocab], np.int64)
        self._longer: dict[int, list[tuple[int, ...]]] = {}
        for word in sampling.bad_words:
            if len(word) > 1 and word[-1] < vocab:
                self._longer.setdefault(word[-2], []).append(tuple(word))
        self.allowed = _bits(sampling.allowed_token_ids, vocab) if sampling.allowed_token_ids else None
        self._seen: Seen | None = None

    @property
    def penalizes(self) -> bool:
        sampling = self._sampling
        return bool(sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty)

    def penalties(self, sequence: Sequence) -> tuple[np.ndarray, float, np.ndarray]:
        """Tokens, what divides a logit above 0 and multiplies another, and what is then taken off `[n]`. Repetitions
        are of prompt and answer, presence and frequency of the answer alone.
        """
        sampling, tokens = self._sampling, np.frombuffer(sequence.tokens, np.int32)
        if self._seen is None:
            first = 0 if sampling.repetition_penalty != 1 else sequence.answer_start
            self._seen = Seen(tokens, first, sequence.answer_start)
        self._seen.follow(tokens)
        counts = self._seen.counts
        amounts = np.where(counts > 0, sampling.presence_penalty + sampling.frequency_penalty * counts, 0.0)
        return self._seen.ids, sampling.repetition_penalty, amounts.astype(np.float32)

    def banned(self, sequence: Sequence) -> np.ndarray:
        """The next token is none of these."""
        parts = [self._single]
        if sequence.num_generated < self._sampling.min_tokens:
            parts.append(self._stops)
        if self._longer and sequence.num_generated:
            parts.append(np.array(self._completing(sequence), np.int64))
        return np.concatenate(parts)

    def _completing(self, sequence: Sequence) -> list[int]:
        """What would complete a bad word of several tokens."""
        words = self._longer.get(sequence.tokens[-1], ())
        longest = max((len(word) for word in words), default=1)
        answer = tuple(sequence.tokens[max(sequence.answer_start, len(sequence.tokens) - longest + 1) :])
        return [word[-1] for word in words if answer[-len(word) + 1 :] == word[:-1]]


def _bits(token_ids: SequenceOf[int], vocab: int) -> np.ndarray:
    allowed = np.zeros(vocab, bool)
    allowed[list(token_ids)] = True
    return np.packbits(allowed, bitorder="little")


@dataclass(frozen=True)
class _Masks:
    """`bits` `[len(rows), vocab / 8]` uint8, the lowest first: what these rows may be."""

    rows: np.ndarray
    bits: np.ndarray

    @classmethod
    def of(cls, by_row: Mapping[int, np.ndarray], vocab: int) -> "_Masks":
        width = -(-vocab // 8)
        bits = np.stack([row[:width] for row in by_row.values()]) if by_row else np.zeros((0, width), np.uint8)
        return cls(np.array(list(by_row), np.int64), bits)


@dataclass(frozen=True)
class Adjustment:
    """A batch's. Places are row * vocab + token."""

    biased: np.ndarray
    biases: np.ndarray
    penalized: np.ndarray
    factors: np.ndarray
    amounts: np.ndarray
    banned: np.ndarray
    allowed: _Masks
    guided: _Masks

    @classmethod
    def of(
        cls, wishes: Mapping[int, tuple[Wishes, Sequence]], guided: Mapping[int, np.ndarray], vocab: int
    ) -> "Adjustment":
        """By row."""
        penalties = {row: w.penalties(sequence) for row, (w, sequence) in wishes.items() if w.penalizes}
        return cls(
            biased=_flat([row * vocab + w.biased for row, (w, _) in wishes.items()], np.int64),
            biases=_flat([w.biases for w, _ in wishes.values()], np.float32),
            penalized=_flat([row * vocab + ids for row, (ids, _, _) in penalties.items()], np.int64),
            factors=_flat([np.full(len(ids), by, np.float32) for ids, by, _ in penalties.values()], np.float32),
            amounts=_flat([amounts for _, _, amounts in penalties.values()], np.float32),
            banned=_flat([row * vocab + w.banned(sequence) for row, (w, sequence) in wishes.items()], np.int64),
            allowed=_Masks.of({row: w.allowed for row, (w, _) in wishes.items() if w.allowed is not None}, vocab),
            guided=_Masks.of(guided, vocab),
        )

    def of_logits(self, plain_BV: Tensor, put: Put) -> Tensor:
        """A copy of float32 logits, changed."""
        biased, biases, penalized, factors, amounts, banned, *masks = put([
            self.biased, self.biases, self.penalized, self.factors, self.amounts, self.banned,
            self.allowed.rows, self.allowed.bits, self.guided.rows, self.guided.bits,
        ])  # fmt: skip
        adjusted = plain_BV.clone()
        flat = adjusted.view(-1)
        if len(biased):
            flat.index_add_(0, biased, biases)
        if len(penalized):
            values = flat.index_select(0, penalized)
            values = torch.where(values > 0, values / factors, values * factors) - amounts
            flat.index_copy_(0, penalized, values)
        if len(banned):
            flat.index_fill_(0, banned, -torch.inf)
        for rows, bits in (masks[:2], masks[2:]):
            if len(rows):
                may_be_none = bool(len(penalized) or len(banned) or len(self.allowed.rows))
                adjusted.index_copy_(0, rows, _only(adjusted, plain_BV, rows, bits, may_be_none))
        return adjusted


def _flat(parts: SequenceOf[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _only(adjusted_BV: Tensor, plain_BV: Tensor, rows: Tensor, bits: Tensor, may_be_none: bool) -> Tensor:
    """Of these rows nothing but what is allowed. Where other wishes (min_tokens, bad words) leave none of that, it
    wins.
    """
    others = ~_unpacked(bits, adjusted_BV.shape[1])
    left = adjusted_BV.index_select(0, rows).masked_fill_(others, -torch.inf)
    if not may_be_none:
        return left
    is_none = ~left.isfinite().any(-1, keepdim=True)
    return torch.where(is_none, plain_BV.index_select(0, rows).masked_fill_(others, -torch.inf), left)


def _unpacked(bits: Tensor, vocab: int) -> Tensor:
    """`[R, vocab]` bool."""
    if bits.device.type == "cpu":  # numpy takes a tenth of the time
        return torch.from_numpy(np.unpackbits(bits.numpy(), axis=1, count=vocab, bitorder="little")).bool()
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, :, None].bitwise_right_shift(shifts).bitwise_and_(1).view(len(bits), -1)[:, :vocab]).bool()
