"""The next token of each sequence, drawn on the host: the CPU engine's sampler.

It is the base of engine.cuda.device_sampler, which draws on a GPU where a batch's requests allow.

Adjusted logits, filtered probabilities, one counter-based random number.

The order is that of vLLM and of OpenAI's documentation: that of logits_processors; temperature; min_p, top_k, top_p.
"""

import logging
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from types import MappingProxyType
from weakref import WeakKeyDictionary

import numpy as np
import torch

from contracts.events import Token
from contracts.sampling import SamplingParams
from engine.sampling.logits_processors import LogitsAdjustment, LogitsProcessorState, on_host
from engine.sampling.philox import uniform
from engine.sampling.token_masks import NO_MASKS, MaskMemory, TokenMasks
from engine.sequence import Sequence
from engine.speculative.proposer import DrawnGuess
from engine.speculative.rejection_sampling import accept_or_redraw

_log = logging.getLogger(__name__)

# Sorting a whole vocabulary costs milliseconds a row; nearly always the nucleus lies within so many of the
# likeliest tokens.
_NUCLEUS = 1024
_COINS = 1 << 62
"""Beside the number of a choice: the numbers that decide whether a draft model's guess is kept."""
NO_GUESSES: Mapping[int, DrawnGuess] = MappingProxyType({})


class Sampler:
    """What it keeps of a sequence goes with the sequence."""

    def __init__(self, eos_token_ids: SequenceOf[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._processor_states: WeakKeyDictionary[Sequence, LogitsProcessorState] = WeakKeyDictionary()

    @torch.inference_mode()
    def sample(
        self,
        sequences: SequenceOf[Sequence],
        logits_BV: torch.Tensor,
        masks: TokenMasks = NO_MASKS,
    ) -> list[Token]:
        """One token a row of `logits_BV` (float32, not modified), `masks` of those with a grammar."""
        adjusted = self.adjusted(sequences, logits_BV, masks)
        # numpy's argmax, the first of equals as torch's, takes 0.1 ms for 16 rows of 49152 where torch's takes 0.7.
        chosen = torch.from_numpy(adjusted.numpy().argmax(-1))
        drawn = [row for row, sequence in enumerate(sequences) if not sequence.sampling.is_greedy]
        if drawn:
            chosen[drawn] = sample_tokens([sequences[row] for row in drawn], adjusted[drawn])
        return _tokens(sequences, logits_BV, chosen.tolist())

    def sample_each(
        self,
        sequences: SequenceOf[Sequence],
        logits_BV: torch.Tensor,
        masks: TokenMasks,
        guesses: Mapping[int, DrawnGuess] = NO_GUESSES,
    ) -> list[Token | str]:
        """If the rows fail together, each is drawn alone: what one request asks for ends no other.

        In place of the token of one that fails, why. `guesses`: by row, what a draft model drew there, which is kept as
        often as it may be.
        """
        try:
            tokens = self.sample(sequences, logits_BV, masks)
            for row, guess in guesses.items():
                if not sequences[row].sampling.is_greedy:
                    tokens[row] = self._keep_or_redraw(sequences[row], logits_BV[row : row + 1], masks, guess)
            return list(tokens)
        except Exception as error:  # whatever a request's parameters bring about
            _log.exception("%d tokens can't be drawn", len(sequences))
            if len(sequences) == 1:
                return [str(error)]
        rows = range(len(sequences))
        alone = [{0: guesses[row]} if row in guesses else NO_GUESSES for row in rows]
        return [self.sample_each([sequences[row]], logits_BV[row : row + 1], masks, alone[row])[0] for row in rows]

    @torch.inference_mode()
    def _keep_or_redraw(
        self, sequence: Sequence, logits_1V: torch.Tensor, masks: TokenMasks, guess: DrawnGuess
    ) -> Token:
        """Return the guess, or what rejection sampling puts in its place.

        The number that decides has a stream of its own beside the one that draws; both are keyed as ever.
        """
        adjusted = self.adjusted([sequence], logits_1V, masks)
        scaled = filter_logits(adjusted / sequence.sampling.temperature, [sequence.sampling])
        p_V = scaled.softmax(-1).double()[0].numpy()
        coin, point = (float(_points([sequence], stream)[0]) for stream in (_COINS, 0))
        _, token_id = accept_or_redraw(guess.token_id, p_V, guess.q_V, coin, point)
        return _tokens([sequence], logits_1V, [token_id])[0]

    def adjusts(self, sequence: Sequence) -> bool:
        """The sequence asks for more than temperature and filters: its logits are changed first."""
        sampling = sequence.sampling
        return bool(
            sampling.logit_bias
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.repetition_penalty != 1
            or sequence.num_generated < sampling.min_tokens
            or sampling.bad_words
            or sampling.allowed_token_ids
            or sampling.grammar
        )

    def stops(self, sampling: SamplingParams, token_id: int) -> bool:
        """The token ends an answer that is long enough to end."""
        return token_id in self.stop_ids(sampling)

    def stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        eos = () if sampling.ignore_eos else self._eos_token_ids
        return (*eos, *sampling.stop_token_ids)

    def adjusted(self, sequences: SequenceOf[Sequence], logits_BV: torch.Tensor, masks: TokenMasks) -> torch.Tensor:
        """Float32 logits as the sequences want them; the same ones if none wants anything."""
        rows = {row: sequence for row, sequence in enumerate(sequences) if self.adjusts(sequence)}
        if not rows:
            return logits_BV
        vocab = logits_BV.shape[1]
        wishes = {row: (self._processor_state(sequence, vocab), sequence) for row, sequence in rows.items()}
        return LogitsAdjustment.of(wishes, masks.guided(sequences), vocab).of_logits(logits_BV, self.put)

    def _processor_state(self, sequence: Sequence, vocab: int) -> LogitsProcessorState:
        if sequence not in self._processor_states:
            self._processor_states[sequence] = LogitsProcessorState(
                sequence.sampling, vocab, self.stop_ids(sequence.sampling)
            )
        return self._processor_states[sequence]

    def put(self, arrays: SequenceOf[np.ndarray]) -> SequenceOf[torch.Tensor]:
        """Return it on the device where logits are."""
        return on_host(arrays)

    def mask_memory(self) -> MaskMemory:
        """Return the memory for the masks of grammars."""
        return MaskMemory()


def sample_tokens(sequences: SequenceOf[Sequence], logits_BV: torch.Tensor) -> torch.Tensor:
    """Inverse transform sampling of the filtered softmax, `[B]` token ids. All rows at once."""
    params = [sequence.sampling for sequence in sequences]
    temperatures = torch.tensor([p.temperature for p in params])[:, None]
    scaled = filter_logits(logits_BV / temperatures, params)
    cumulative = scaled.softmax(-1).double().cumsum(-1)
    points = torch.from_numpy(_points(sequences))[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, points, right=True)[:, 0].clamp_(max=logits_BV.shape[1] - 1)


def _points(sequences: SequenceOf[Sequence], stream: int = 0) -> np.ndarray:
    """Return the positions that key the draws.

    It is the absolute position of the token, so a replay from a longer prompt draws the same number. `stream`: 0, or
    _COINS for numbers that are independent of these.
    """
    mask = (1 << 64) - 1
    seeds = np.array([sequence.sampling.seed & mask for sequence in sequences], np.uint64)
    choices = np.array([sequence.sampling.choice | stream for sequence in sequences], np.uint64)
    positions = np.array([len(sequence.tokens) for sequence in sequences], np.uint64)
    return uniform(seeds, choices, positions)


def filter_logits(logits_BV: torch.Tensor, params: SequenceOf[SamplingParams]) -> torch.Tensor:
    """-inf for every token that min_p, top_k or top_p excludes."""
    if any(p.min_p > 0 for p in params):
        floors = torch.tensor([p.min_p for p in params]).log()[:, None]
        logits_BV = logits_BV.masked_fill(logits_BV < logits_BV.amax(-1, keepdim=True) + floors, -torch.inf)
    rows = [row for row, p in enumerate(params) if _top_k(p) or p.top_p < 1]
    if not rows:
        return logits_BV
    vocab = logits_BV.shape[1]
    top_k = torch.tensor([_top_k(params[row]) or vocab for row in rows])[:, None]
    top_p = torch.tensor([params[row].top_p for row in rows], dtype=torch.float64)[:, None]
    thresholds = torch.full((len(params), 1), -torch.inf)
    thresholds[rows] = _thresholds(logits_BV[rows], top_k, top_p, min(_NUCLEUS, vocab))
    return logits_BV.masked_fill(logits_BV < thresholds, -torch.inf)


def _top_k(params: SamplingParams) -> int:
    """0 for no limit, which clients write as null, 0 or -1."""
    return max(params.top_k or 0, 0)


def _thresholds(logits_BV: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int) -> torch.Tensor:
    """The smallest logit that stays, `[B, 1]`.

    Tokens that tie with it stay too, so that order can't matter.

    Looks at the `width` likeliest tokens, and at all of them only where those do not decide.
    """
    top = logits_BV.topk(width, -1).values
    within_k = torch.arange(width) < top_k
    kept = top.masked_fill(~within_k, -torch.inf).double()
    whole = logits_BV.double().logsumexp(-1, keepdim=True)
    shares = (kept - torch.where(top_k <= width, kept.logsumexp(-1, keepdim=True), whole)).exp()
    mass = shares.cumsum(-1)
    vocab = logits_BV.shape[1]
    undecided = (top_k[:, 0] > width) & ((mass[:, -1] < top_p[:, 0]) | (top_k[:, 0] < vocab))
    if width < vocab and bool(undecided.any()):
        return _thresholds(logits_BV, top_k, top_p, vocab)
    inside = within_k & ((mass - shares < top_p) | (top_p >= 1))
    inside[:, 0] = True
    return top.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)


def _tokens(sequences: SequenceOf[Sequence], logits_BV: torch.Tensor, chosen: list[int]) -> list[Token]:
    tokens = [Token(sequence.num_generated, token) for sequence, token in zip(sequences, chosen, strict=True)]
    for row, sequence in enumerate(sequences):
        if sequence.sampling.logprobs is not None:
            tokens[row] = _with_logprobs(tokens[row], logits_BV[row].log_softmax(-1), sequence.sampling)
    return tokens


def _with_logprobs(token: Token, logprobs_V: torch.Tensor, sampling: SamplingParams) -> Token:
    own = float(logprobs_V[token.token_id])
    if asked := sampling.logprob_token_ids:
        return with_asked_logprobs(token, own, asked, logprobs_V[list(asked)].tolist())
    top = logprobs_V.topk(sampling.logprobs or 0)
    pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return Token(token.index, token.token_id, own, pairs)


def with_asked_logprobs(token: Token, own: float, asked: SequenceOf[int], values: SequenceOf[float]) -> Token:
    """Return the token with log-probabilities of itself and then of `asked`, as vLLM orders them.

    None comes twice.
    """
    pairs = {token.token_id: own} | dict(zip(asked, values, strict=True))
    return Token(token.index, token.token_id, own, list(pairs.items()))
