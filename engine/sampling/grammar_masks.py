"""The tokens that a request's grammar allows next, found on threads while the device computes.

checkpoint.grammar_compiler compiles the grammar, logits_processors applies the masks.

A grammar's state is a function of the answer's tokens alone, so nothing of it crosses in a handoff: decode reads the
grammar out of the request's SamplingParams and lets it consume token 0.
"""

import os
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import consume_token_par, fill_next_token_bitmask_par

from checkpoint.checkpoint import Checkpoint
from checkpoint.grammar_compiler import Vocabulary, compiled, error_of
from contracts.ids import RequestId
from engine.sampling.token_masks import NO_MASKS, MaskMemory, TokenMasks
from engine.sequence import Sequence
from process.deep_stack_threads import DeepThreads

NUM_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
NUM_KEPT = 128
"""Grammars that stay compiled, the latest, each once a lane: of many requests with the same schema most take a copy,
0.02 ms where compiling takes 1 (65 of 20 000 values of an enum, which keeps 8 MiB).
"""
NUM_LANES = NUM_THREADS
"""How often a small grammar is compiled, if so many requests use it at once. llguidance's copies of a matcher share a
lexer, and only one at a time computes its mask: of 64 copies that took as long on eight threads as on one.
"""
LARGE = 16384
"""Characters of a grammar that takes milliseconds to compile: 20 000 values of an enum, 0.5 MB, took 65 ms."""
PATIENCE_S = 0.02
"""How long a prompt's first step may wait for a small grammar, most of which take a millisecond. Others take hours:
their size does not tell, and no step waits for them.
"""


@dataclass
class Grammar:
    """The grammar of one request, of whose answer `num_consumed` tokens went or are on their way into it.

    `compiled` raises ValueError if it can't be. Of the same `source`, those in one `lane` share a lexer.
    """

    source: str
    lane: int
    compiled: Future[LLMatcher]
    num_consumed: int = 0


@dataclass(frozen=True)
class _Guided:
    """A request whose mask is wanted after `tokens` more of its answer."""

    request_id: RequestId
    lane: int
    compiled: Future[LLMatcher]
    tokens: list[int]


_NOTHING: Future[TokenMasks] = Future()
_NOTHING.set_result(NO_MASKS)


class Grammars:
    """The grammars of an engine's requests.

    Calls from the engine's thread; the work is done on others, all masks of a batch by one of them, which has Rust's
    help: Python's own threads would wait for the interpreter. `memory`: where the device reads them from.
    """

    def __init__(self, checkpoint: Checkpoint, memory: MaskMemory | None = None) -> None:
        self._memory = memory or MaskMemory()
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
            lane = 0 if is_large else self._free_lane(grammar)
            found = threads.submit(lambda: self._compiled(grammar, lane).deep_copy())
            if patience_s and not is_large and all(other.compiled.done() for other in self._open.values()):
                wait([found], patience_s)
            self._open[sequence] = Grammar(grammar, lane, found)

    def is_ready(self, sequence: Sequence) -> bool:
        """A step with this sequence would wait for no compiler."""
        grammar = self._open.get(sequence)
        return grammar is None or grammar.compiled.done()

    def begin(self, sequences: SequenceOf[Sequence]) -> Future[TokenMasks]:
        """Start on the masks for the next token of those `sequences` that have a grammar."""
        guided = [_taken(self._open[sequence], sequence) for sequence in sequences if sequence in self._open]
        return self._masker.submit(self._masks, guided) if guided else _NOTHING

    def forget(self, sequence: Sequence) -> None:
        """The request is gone. Idempotent."""
        self._open.pop(sequence, None)

    def _free_lane(self, source: str) -> int:
        """Return the lane in which the fewest requests use this grammar."""
        used = Counter(other.lane for other in self._open.values() if other.source == source)
        return min(range(NUM_LANES), key=lambda lane: used[lane])

    def _compile(self, grammar: str, lane: int) -> LLMatcher:
        return compiled(self._tokens.result(), grammar)

    def _masks(self, guided: SequenceOf[_Guided]) -> TokenMasks:
        errors = dict[RequestId, str]()
        matchers = {each.request_id: matcher for each in guided if (matcher := _matcher(each, errors)) is not None}
        lanes = {each.request_id: each.lane for each in guided}
        by_lane = sorted(guided, key=lambda each: each.lane)  # a thread takes neighbours: others need not wait for it
        newest = [(matchers[each.request_id], each.tokens[0]) for each in by_lane if _is_step(each, matchers)]
        if newest:  # it refuses none
            consume_token_par(self._executor, newest)
        errors.update((name, error_of(matcher)) for name, matcher in matchers.items() if matcher.is_error())
        going_on = [(name, matcher) for name, matcher in matchers.items() if name not in errors]
        if not going_on:
            return TokenMasks(errors=errors)
        num_words = -(-self._tokens.result().vocab_size // 32)
        bits = self._memory.allocate(len(going_on), 4 * num_words)
        order = sorted(range(len(going_on)), key=lambda row: lanes[going_on[row][0]])
        numbered = [(going_on[row][1], row) for row in order]
        fill_next_token_bitmask_par(self._executor, numbered, bits.numpy().view(np.int32))
        errors.update((name, error_of(matcher)) for name, matcher in going_on if matcher.is_error())
        return TokenMasks(self._memory.upload(bits), {name: row for row, (name, _) in enumerate(going_on)}, errors)


def _taken(grammar: Grammar, sequence: Sequence) -> _Guided:
    """Take the tokens that the grammar has not consumed; by the next call it has."""
    new = sequence.tokens[sequence.answer_start + grammar.num_consumed :].tolist()
    grammar.num_consumed += len(new)
    return _Guided(sequence.request_id, grammar.lane, grammar.compiled, new)


def _matcher(guided: _Guided, errors: dict[RequestId, str]) -> LLMatcher | None:
    """Return the compiled grammar after all its tokens, unless that is one, as in a step of an answer.

    None if it could not be compiled; why is in `errors` then.
    """
    try:
        matcher = guided.compiled.result()
    except ValueError as error:  # what llguidance says of a tokenizer or a grammar that it can't serve
        errors[guided.request_id] = str(error)
        return None
    if len(guided.tokens) > 1:
        matcher.consume_tokens(guided.tokens)
    return matcher


def _is_step(guided: _Guided, matchers: Mapping[RequestId, LLMatcher]) -> bool:
    """Return whether one token is to be consumed, which Rust does for all such requests at once."""
    return len(guided.tokens) == 1 and guided.request_id in matchers
