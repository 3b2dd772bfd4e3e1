"""Logits as requests want them changed before a token is drawn, for any device.

The host works out which of a batch's logits change and how, then a few operations of torch do it where the logits are.

The order is that of vLLM and of OpenAI's documentation: logit_bias, penalties, min_tokens, bad_words, allowed tokens,
grammar.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from contracts.sampling import SamplingParams
from engine.sampling.token_masks import GuidedRows
from engine.sequence import Sequence

# Divided by less, and by a low temperature, a logit would be infinite in float32. One of an unseen token counts for
# nothing beside one that is divided by this.
_LEAST_REPETITION = 1e-20

Put = Callable[[SequenceOf[np.ndarray]], SequenceOf[Tensor]]
"""Copies of arrays where the logits are."""


def on_host(arrays: SequenceOf[np.ndarray]) -> list[Tensor]:
    """The arrays themselves."""
    return [torch.from_numpy(array) for array in arrays]


class TokenCounts:
    """The tokens of a sequence from `first` on, each once.

    `ids` `[n]` int64, and in `amounts` `[n]` float32 what penalties take off a logit for what the answer has of it. A
    token is counted once, whenever `follow` meets it: a step has one, a prompt thousands.
    """

    def __init__(self, tokens: "array[int]", first: int, answer_start: int, presence: float, frequency: float) -> None:
        ids = np.unique(np.frombuffer(tokens, np.int32)[first:]).astype(np.int64)
        self._presence, self._frequency = presence, frequency
        self._room_ids, self._room_amounts = ids, np.zeros(len(ids), np.float32)
        self._places = {token: place for place, token in enumerate(ids.tolist())}
        self._counts: Counter[int] = Counter()
        self._num_followed = answer_start

    @property
    def ids(self) -> np.ndarray:
        return self._room_ids[: len(self._places)]

    @property
    def amounts(self) -> np.ndarray:
        return self._room_amounts[: len(self._places)]

    def follow(self, tokens: "array[int]") -> None:
        """`tokens`: all of the sequence, prompt and answer."""
        for token in tokens[self._num_followed :]:
            self._counts[token] += 1
            place = self._place(token)  # first, since it may make room
            self._room_amounts[place] = self._presence + self._frequency * self._counts[token]
        self._num_followed = len(tokens)

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._room_ids):
            room = max(64, 2 * place)
            self._room_ids = np.resize(self._room_ids, room)
            self._room_amounts = np.resize(self._room_amounts, room)
        self._room_ids[place] = token
        return place


class LogitsProcessorState:
    """One sequence's, kept from token to token: what does not change is worked out once."""

    def __init__(self, sampling: SamplingParams, vocab: int, stop_ids: SequenceOf[int]) -> None:
        self._sampling = sampling
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
        self.repetition = max(sampling.repetition_penalty, _LEAST_REPETITION)
        self.penalizes = bool(self.repetition != 1 or sampling.presence_penalty or sampling.frequency_penalty)
        self._seen: TokenCounts | None = None

    def seen(self, sequence: Sequence) -> TokenCounts:
        """Repetitions are of prompt and answer, presence and frequency of the answer alone."""
        if self._seen is None:
            first = 0 if self.repetition != 1 else sequence.answer_start
            penalties = self._sampling.presence_penalty, self._sampling.frequency_penalty
            self._seen = TokenCounts(sequence.tokens, first, sequence.answer_start, *penalties)
        self._seen.follow(sequence.tokens)
        return self._seen

    def banned(self, sequence: Sequence) -> list[np.ndarray]:
        """The next token is none of these."""
        parts = [self._single] if len(self._single) else []
        if sequence.num_generated < self._sampling.min_tokens:
            parts.append(self._stops)
        if self._longer and sequence.num_generated:
            parts.append(np.array(self._completing(sequence), np.int64))
        return parts

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
class LogitsAdjustment:
    """A batch's, as arrays that go to the device together; empty where nobody wants that.

    `biases` and `penalties` are (places, values) and (places, factors, amounts), a place row * vocab + token; of
    `allowed`, which is (rows, bits), the bits say what these rows may be, the lowest first. The bits of `guided` are
    there already.
    """

    biases: tuple[np.ndarray, ...]
    penalties: tuple[np.ndarray, ...]
    banned: tuple[np.ndarray, ...]
    allowed: tuple[np.ndarray, ...]
    guided: GuidedRows | None

    @classmethod
    def of(
        cls, wishes: Mapping[int, tuple[LogitsProcessorState, Sequence]], guided: GuidedRows | None, vocab: int
    ) -> "LogitsAdjustment":
        """Return the adjustments by row."""
        biased = {row: w for row, (w, _) in wishes.items() if len(w.biased)}
        penalized = {row: (w.repetition, w.seen(sequence)) for row, (w, sequence) in wishes.items() if w.penalizes}
        penalized = {row: (factor, seen) for row, (factor, seen) in penalized.items() if len(seen.ids)}
        banned = [(row, part) for row, (w, sequence) in wishes.items() for part in w.banned(sequence)]
        allowed = {row: w.allowed for row, (w, _) in wishes.items() if w.allowed is not None}
        return cls(
            biases=_biases(biased, vocab) if biased else (),
            penalties=_penalties(penalized, vocab) if penalized else (),
            banned=(_places(banned, vocab),) if banned else (),
            allowed=_masks(allowed, vocab),
            guided=guided,
        )

    def of_logits(self, plain_BV: Tensor, put: Put) -> Tensor:
        """A copy of float32 logits, changed."""
        index = () if self.guided is None else self.guided.index
        groups = self.biases, self.penalties, self.banned, self.allowed, index
        arrays = [array for group in groups for array in group]
        if self.guided is not None and not arrays:  # each row has a grammar and no other wish: one pass over them
            return plain_BV.masked_fill(_forbidden(self.guided.bits, plain_BV.shape[1]), -torch.inf)
        there = iter(put(arrays) if arrays else ())
        biases, penalties, banned, allowed, index = ([next(there) for _ in group] for group in groups)
        adjusted = plain_BV.clone()
        flat = adjusted.view(-1)
        if biases:
            flat.index_add_(0, *biases)
        if penalties:
            places, factors, amounts = penalties
            values = flat.index_select(0, places)
            values = torch.where(values > 0, values / factors, values * factors) - amounts
            flat.index_copy_(0, places, values)
        if banned:
            flat.index_fill_(0, banned[0], -torch.inf)
        may_be_none = bool(penalties or banned or allowed)
        if allowed:
            rows, bits = allowed
            adjusted.index_copy_(0, rows, _only(adjusted, plain_BV, rows, bits, may_be_none))
        if self.guided is None:
            return adjusted
        if not index:
            return _only(adjusted, plain_BV, None, self.guided.bits, may_be_none)
        rows, places = index
        bits = self.guided.bits.index_select(0, places)
        return adjusted.index_copy_(0, rows, _only(adjusted, plain_BV, rows, bits, may_be_none))


def _places(by_row: SequenceOf[tuple[int, np.ndarray]], vocab: int) -> np.ndarray:
    return np.concatenate([row * vocab + token_ids for row, token_ids in by_row])


def _biases(by_row: Mapping[int, LogitsProcessorState], vocab: int) -> tuple[np.ndarray, ...]:
    places = _places([(row, wishes.biased) for row, wishes in by_row.items()], vocab)
    return places, np.concatenate([wishes.biases for wishes in by_row.values()])


def _penalties(by_row: Mapping[int, tuple[float, TokenCounts]], vocab: int) -> tuple[np.ndarray, ...]:
    places = _places([(row, seen.ids) for row, (_, seen) in by_row.items()], vocab)
    factors = np.array([factor for factor, _ in by_row.values()], np.float32)
    lengths = [len(seen.ids) for _, seen in by_row.values()]
    return places, np.repeat(factors, lengths), np.concatenate([seen.amounts for _, seen in by_row.values()])


def _masks(by_row: Mapping[int, np.ndarray], vocab: int) -> tuple[np.ndarray, ...]:
    if not by_row:
        return ()
    width = -(-vocab // 8)
    return np.array(list(by_row), np.int64), np.stack([bits[:width] for bits in by_row.values()])


def _only(adjusted_BV: Tensor, plain_BV: Tensor, rows: Tensor | None, bits: Tensor, may_be_none: bool) -> Tensor:
    """Return these rows, or all (None), with nothing left but what is allowed.

    Where other wishes (min_tokens, bad words) leave none of that, it wins.
    """
    others = _forbidden(bits, adjusted_BV.shape[1])
    left = adjusted_BV if rows is None else adjusted_BV.index_select(0, rows)
    left.masked_fill_(others, -torch.inf)
    if not may_be_none:
        return left
    # In place, and without `isfinite`, which makes copies: of a full batch each is as large as all of its logits.
    is_none = left.amax(-1, keepdim=True) == -torch.inf
    plain = plain_BV.clone() if rows is None else plain_BV.index_select(0, rows)
    return torch.where(is_none, plain.masked_fill_(others, -torch.inf), left, out=left)


def _forbidden(bits: Tensor, vocab: int) -> Tensor:
    """Return `[R, vocab]` bool: the bit of a token is not set."""
    bits = bits[:, : -(-vocab // 8)]
    if bits.device.type == "cpu":  # numpy takes a tenth of the time
        return torch.from_numpy(np.unpackbits(~bits.numpy(), axis=1, count=vocab, bitorder="little")).bool()
    return bits[:, :, None].bitwise_and(_bit_values(bits.device)).eq(0).view(len(bits), -1)[:, :vocab]


@lru_cache
def _bit_values(device: torch.device) -> Tensor:
    """Return the values of the bits of a byte, the lowest first.

    Made anew they would be a copy to the device in each step.
    """
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
