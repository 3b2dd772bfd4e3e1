"""The tokens that a request's grammar allows next, found on threads beside the forward pass.

A grammar's state is a function of the answer's tokens alone, so nothing of it crosses in a handoff: decode reads the
grammar out of the request's SamplingParams and lets it consume token 0.
"""

import os
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from checkpoint.checkpoint import Checkpoint
from checkpoint.grammar_compiler import Vocabulary, compiled, error_of
from contracts.ids import RequestId
from engine.sequence import Sequence
from process.deep_stack_threads import DeepThreads

NUM_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
NUM_KEPT = 32
"""Grammars that stay compiled, the latest: of many requests with the same schema all but one take a copy, 0.02 ms
where compiling takes 1 (65 of 20 000 values of an enum, which keeps 8 MiB).
"""
LARGE = 16384
"""Characters of a grammar that takes milliseconds to compile: 20 000 values of an enum, 0.5 MB, took 65 ms."""
PATIENCE_S = 0.02
"""How long a prompt's first step may wait for a small grammar, most of which take a millisecond. Others take hours:
their size does not tell, and no step waits for them.
"""


@dataclass
class Grammar:
    """One request's, `num_consumed` tokens of the answer into its text.

    `compiled` raises ValueError if it can't be.
    """

    compiled: Future[LLMatcher]
    num_consumed: int = 0


@dataclass(frozen=True)
class Masks:
    """`allowed[request]`: a bit for each token of the tokenizer, uint8, the lowest first.

    Or in `errors[request]` why the grammar can't go on.
    """

    allowed: dict[RequestId, np.ndarray] = field(default_factory=dict)
    errors: dict[RequestId, str] = field(default_factory=dict)


_NO_MASKS: Future[Masks] = Future()
_NO_MASKS.set_result(Masks())


class Grammars:
    """The grammars of an engine's requests.

    Calls from the engine's thread; the work is done on others, all masks of a batch by one of them, which has Rust's
    help: Python's own threads would wait for the interpreter.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._compilers, self._masker = DeepThreads(NUM_THREADS, "grammar"), DeepThreads(1, "masks")
        self._large_compiler = DeepThreads(1, "large-grammar")  # small ones wait behind none of these
        self._executor = LLExecutor(NUM_THREADS)
        self._compiled = lru_cache(NUM_KEPT)(self._compile)
        self._open: dict[Sequence, Grammar] = {}
        # A fraction of a second for a large vocabulary: now, not beside running answers.
        self._tokens = self._compilers.submit(lambda: Vocabulary.of(checkpoint).tokens())

    def open(self, sequence: Sequence, patience_s: float = 0.0) -> None:
        """Its grammar, if it has one, is compiled from now on.

        A small one is waited for, but not behind another.
        """
        grammar = sequence.sampling.grammar
        if grammar:
            is_large = len(grammar) >= LARGE
            threads = self._large_compiler if is_large else self._compilers
            found = threads.submit(lambda: self._compiled(grammar).deep_copy())
            if patience_s and not is_large and all(other.compiled.done() for other in self._open.values()):
                wait([found], patience_s)
            self._open[sequence] = Grammar(found)

    def is_ready(self, sequence: Sequence) -> bool:
        """A step with this sequence would wait for no compiler."""
        grammar = self._open.get(sequence)
        return grammar is None or grammar.compiled.done()

    def begin(self, sequences: SequenceOf[Sequence]) -> Future[Masks]:
        """Start on the masks for the next token of those `sequences` that have a grammar."""
        guided = [(sequence, self._open[sequence]) for sequence in sequences if sequence in self._open]
        return self._masker.submit(self._masks, guided) if guided else _NO_MASKS

    def forget(self, sequence: Sequence) -> None:
        """The request is gone. Idempotent."""
        self._open.pop(sequence, None)

    def _compile(self, grammar: str) -> LLMatcher:
        return compiled(self._tokens.result(), grammar)

    def _masks(self, guided: SequenceOf[tuple[Sequence, Grammar]]) -> Masks:
        masks, rows = Masks(), dict[RequestId, LLMatcher]()
        for sequence, grammar in guided:
            try:
                rows[sequence.request_id] = _advanced(grammar, sequence)
            except ValueError as error:  # what llguidance says of a tokenizer or a grammar that it can't serve
                masks.errors[sequence.request_id] = str(error)
        if rows:
            bits = allocate_token_bitmask(len(rows), self._tokens.result().vocab_size)
            numbered = list(zip(rows.values(), range(len(rows)), strict=True))
            fill_next_token_bitmask_par(self._executor, numbered, bits)
            masks.allowed.update(zip(rows, bits.view(np.uint8), strict=True))
        masks.errors.update((name, error_of(matcher)) for name, matcher in rows.items() if matcher.is_error())
        return masks


def _advanced(grammar: Grammar, sequence: Sequence) -> LLMatcher:
    """After all tokens of the answer so far. Raises ValueError if there is no way on, or none ever."""
    matcher = grammar.compiled.result()
    new = sequence.tokens[sequence.answer_start + grammar.num_consumed :].tolist()
    if new:
        matcher.consume_tokens(new)
        grammar.num_consumed += len(new)
    if matcher.is_error():
        raise ValueError(error_of(matcher))
    return matcher
