"""Structured output: which tokens a request's grammar allows next, worked out on a thread beside the forward pass.

A grammar's state is a function of the answer's tokens alone, so nothing of it crosses in a handoff: decode reads the
grammar out of the request's SamplingParams and lets it consume token 0.
"""

from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from checkpoint.checkpoint import Checkpoint
from contracts.deep_threads import DeepThreads
from contracts.ids import RequestId
from engine.sequence import Sequence


@dataclass
class Grammar:
    """One request's: made when it is first needed, `num_consumed` tokens of the answer into its text."""

    matcher: LLMatcher
    num_consumed: int = 0


@dataclass
class Masks:
    """`allowed[request]`: a bit for each token of the tokenizer, uint8, the lowest first. Of no use where
    `errors[request]` says why the grammar can't go on.
    """

    allowed: dict[RequestId, np.ndarray] = field(default_factory=dict)
    errors: dict[RequestId, str] = field(default_factory=dict)


class Grammars:
    """The grammars of an engine's requests. Calls from the engine's thread; the work is done on one of its own."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._thread = DeepThreads(1, "grammar")
        self._open: dict[RequestId, Grammar] = {}
        # A fraction of a second for a large vocabulary: now, not beside running answers.
        self._tokenizer = self._thread.submit(_tokenizer, checkpoint)

    def begin(self, sequences: SequenceOf[Sequence]) -> Future[Masks] | None:
        """Start on the masks for the next token of those `sequences` that have a grammar; None if there is none."""
        guided = [sequence for sequence in sequences if sequence.sampling.grammar]
        return self._thread.submit(self._masks, guided) if guided else None

    def forget(self, request_id: RequestId) -> None:
        """The request is gone. Idempotent."""
        self._open.pop(request_id, None)

    def _masks(self, sequences: SequenceOf[Sequence]) -> Masks:
        try:
            tokenizer = self._tokenizer.result()
        except ValueError as error:  # what llguidance says of a tokenizer that it can't serve
            return Masks(errors={sequence.request_id: str(error) for sequence in sequences})
        masks, bits = Masks(), allocate_token_bitmask(len(sequences), tokenizer.vocab_size)
        for row, sequence in enumerate(sequences):
            try:
                fill_next_token_bitmask(self._advance(sequence, tokenizer), bits, row)
            except ValueError as error:  # what llguidance says of a grammar that it can't serve
                masks.errors[sequence.request_id] = str(error)
        masks.allowed = {s.request_id: row for s, row in zip(sequences, bits.view(np.uint8), strict=True)}
        return masks

    def _advance(self, sequence: Sequence, tokenizer: LLTokenizer) -> LLMatcher:
        """The request's grammar, after all tokens of its answer so far. Raises ValueError if it does not compile."""
        grammar = self._open.get(sequence.request_id)
        if grammar is None:
            grammar = Grammar(LLMatcher(tokenizer, sequence.sampling.grammar))
            self._open[sequence.request_id] = grammar
        new = sequence.tokens[sequence.answer_start + grammar.num_consumed :].tolist()
        if new:
            grammar.matcher.consume_tokens(new)
            grammar.num_consumed += len(new)
        if grammar.matcher.is_error():
            raise ValueError(grammar.matcher.get_error())
        return grammar.matcher


def _tokenizer(checkpoint: Checkpoint) -> LLTokenizer:
    tokenizer = checkpoint.tokenizer()
    return LLTokenizer(
        tokenizer.to_str(),
        n_vocab=max(checkpoint.config.vocab_size, tokenizer.get_vocab_size()),  # either may have more tokens
        eos_token=list(checkpoint.eos_token_ids),
    )
