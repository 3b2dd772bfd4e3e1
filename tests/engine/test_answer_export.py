"""A running answer moves from one engine to another while it goes on: its tokens are those of one that never moved."""

# pyright: reportArgumentType=false, reportPrivateUsage=false
# Plain strings stand for request ids.

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from contracts.errors import Corrupt, OutOfBlocks, RequestError
from contracts.events import Token
from contracts.sampling import SamplingParams
from engine.cuda.kv.peer_pool import PeerPool
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import ChunkDone, EngineRequest, Reservation
from engine.sequence import Status
from tests.engine.driving import drain, greedy, random_prompts, request, settings
from tests.engine.tiny_models import VOCAB

pytestmark = pytest.mark.slow

Make = Callable[..., Engine]

PROMPT, OTHER = random_prompts(VOCAB, (37, 21))
LENGTH = 100
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.1, "seed": 5, "top_p": 0.9, "logprobs": 2},
    "second of two": {"temperature": 1.1, "seed": 5, "choice": 1},
    "penalised": {"temperature": 0.7, "seed": 6, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    "repeated": {"repetition_penalty": 1.8},
    "long enough": {"ignore_eos": False, "stop_token_ids": tuple(range(0, VOCAB, 2)), "min_tokens": 98},
    "bad words": {"bad_words": tuple((first, second) for first in range(0, VOCAB, 3) for second in range(0, VOCAB, 5))},
}


def whole(engine: Engine, sampling: SamplingParams) -> list[Token]:
    engine.submit(request("whole", PROMPT, sampling))
    return [sampled.token for output in drain(engine) for sampled in output.sampled]


def same(found: list[Token], expected: list[Token]) -> bool:
    assert [(token.index, token.token_id) for token in found] == [(token.index, token.token_id) for token in expected]
    assert [token.logprob for token in found] == pytest.approx([token.logprob for token in expected], abs=1e-4)
    return True


class Move:
    """The move of the answer `name` of `source` to `target`, as two workers would make it.

    `tokens`: those of the answer that have been told so far. `chunks`: the KV that was told.
    """

    def __init__(self, source: Engine, target: Engine, sampling: SamplingParams, name: str = "a") -> None:
        self.source, self.target, self.name, self.there = source, target, name, f"{name} there"
        self.sampling = sampling
        self.tokens: list[Token] = []
        self.chunks: list[ChunkDone] = []
        self.num_shown = 0
        self.reservation: Reservation | None = None
        source.submit(request(name, PROMPT, sampling))

    @cached_property
    def remote(self) -> PeerPool:
        """The source's pool, as the target's device reads it."""
        return self.target.transfer_pool.attach(self.source.transfer_pool.share())

    @property
    def size(self) -> int:
        return self.source.layout.block_size

    @property
    def is_over(self) -> bool:
        return self.source.sequences.get(self.name) is None

    def step(self, until: int) -> None:
        """Step until so many tokens were told, or the answer is over."""
        while len(self.tokens) < until and not self.is_over:
            output = self.source.step()
            self.tokens += [sampled.token for sampled in output.sampled if sampled.request_id == self.name]
            self.source.check()

    def job(self) -> EngineRequest:
        answered = [token.token_id for token in self.tokens[: self.num_shown]]
        asked = request(self.there, [*PROMPT, *answered], self.sampling)
        return replace(asked, num_answered=len(answered))

    def reserve(self, num_spare: int) -> Reservation:
        """Show what was told so far, and take pages for so many tokens more."""
        self.num_shown = len(self.tokens)
        job = self.job()
        self.reservation = self.target.reserve(job, num_tokens=len(job.token_ids) + num_spare)
        return self.reservation

    def copy(self, chunk: ChunkDone | None) -> None:
        if chunk is None:
            return
        assert self.reservation is not None
        assert chunk.first_token == sum(each.num_tokens for each in self.chunks) and chunk.first_token % self.size == 0
        self.chunks.append(chunk)
        first = max(chunk.first_token, self.reservation.skip_tokens)
        skipped = (first - chunk.first_token) // self.size
        pages = chunk.blocks[skipped:]
        into = self.reservation.blocks[first // self.size :][: len(pages)]
        if chunk.checksums is None:
            self.target.pool_bytes[:, into] = self.source.pool_bytes[:, pages]
        elif pages:
            found = self.remote.pull(pages, into, True)
            sums = self.source.transfer_pool.in_parts(chunk.checksums.wait(), chunk.blocks, 1)
            assert found is not None and np.array_equal(found, sums[skipped:])

    def stop(self) -> bool:
        """Pause after a token that was not shown, and copy the rest; False if the answer has ended meanwhile."""
        self.step(self.num_shown + 1)
        assert self.is_over or self.source.exports.pause(self.name)
        while not self.is_over and (tail := self.source.exports.tail(self.name)) is None:
            self.step(len(self.tokens) + 1)
        if self.is_over:
            return False
        assert tail.num_tokens == len(PROMPT) + len(self.tokens) - 1
        self.copy(tail.chunk)
        assert sum(chunk.num_tokens for chunk in self.chunks) == tail.num_tokens
        return True

    def commit(self) -> None:
        self.target.adopt(self.there, self.tokens[-1], self.tokens[self.num_shown : -1])
        self.target.incoming_writer_ended(self.there)
        self.source.release(self.name)
        self.source.exports.reader_ended(self.name)

    def abort(self) -> None:
        self.source.exports.resume(self.name)
        self.source.exports.reader_ended(self.name)
        self.target.release(self.there)
        self.target.incoming_writer_ended(self.there)

    def rest(self, engine: Engine, name: str) -> list[Token]:
        return [told.token for output in drain(engine) for told in output.sampled if told.request_id == name]


def moved(move: Move, shown: int, steps: tuple[int, ...], num_spare: int = LENGTH) -> list[Token]:
    """The answer to the end, moved after so many tokens; KV is told as soon as each of `steps` tokens are there."""
    move.step(shown)
    move.reserve(num_spare)
    for step in steps:
        move.copy(move.source.exports.blocks(move.name))
        move.step(step)
    assert move.stop()
    move.commit()
    return [*move.tokens, *move.rest(move.target, move.there)]


def all_free(*engines: Engine) -> bool:
    for engine in engines:
        drain(engine)
        engine.check()
        assert engine.stats().free_tokens == engine.capacity_tokens
    return True


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_moved_answer_is_that_of_one_engine(make: Make, name: str):
    sampling = greedy(LENGTH, **SAMPLINGS[name])
    expected = whole(make(), sampling)
    source, target = make(prefix_cache=False), make(prefix_cache=False)
    for shown, steps in ((1, (2,)), (27, (28, 29, 95))):
        assert same(moved(Move(source, target, sampling), shown, steps), expected)
    assert all_free(source, target)


def test_a_grammar_goes_on_where_it_was():
    source, target = (load_engine(settings(dtype="auto", kv_cache_nbytes=128 << 20)) for _ in range(2))
    grammar = LLMatcher.grammar_from_regex(r"[a-f]{4}-[0-9]{6}-(yes|no)")
    sampling = greedy(60, grammar=grammar, ignore_eos=False, temperature=0.8, seed=7)
    expected = whole(source, sampling)
    for shown in range(1, len(expected) - 4, 5):
        assert same(moved(Move(source, target, sampling), shown, (shown + 2,)), expected)


def test_answers_beside_it_go_on_at_both_ends(make: Make):
    sampling = greedy(LENGTH, temperature=0.9, seed=8)
    expected = whole(make(), sampling)
    source, target = make(), make()
    for engine in (source, target):
        engine.submit(request("beside", OTHER, greedy(LENGTH)))
    beside = next(iter(source.sequences))
    move = Move(source, target, sampling)
    assert same(moved(move, 10, (30, 31, 50)), expected)
    assert len(beside.tokens) >= len(OTHER) + 50
    assert all_free(source, target)


def test_an_answer_moves_on_and_back(make: Make):
    """Each engine has the other's blocks of it in its prefix cache, and is sent the rest alone."""
    sampling = greedy(LENGTH, temperature=0.9, seed=9)
    engines = make(), make()
    expected = whole(make(), sampling)
    skipped = []
    for index in range(3):
        source, target = engines if index % 2 == 0 else engines[::-1]
        move = Move(source, target, sampling, name=str(index))
        assert same(moved(move, 80, (90,)), expected)
        assert move.reservation is not None
        skipped.append(move.reservation.skip_tokens)
    is_shared = engines[0]._prefix_cache._caches_decoded_kv
    num_whole = (len(PROMPT) + 80 * is_shared) // engines[0].layout.block_size * engines[0].layout.block_size
    assert skipped == [0, num_whole, num_whole]
    assert all_free(*engines)


@pytest.mark.parametrize("is_paused", [False, True])
def test_an_answer_whose_move_is_given_up_goes_on_here_and_may_move_later(make: Make, is_paused: bool):
    sampling = greedy(LENGTH, temperature=0.9, seed=10)
    expected = whole(make(), sampling)
    source, target = make(prefix_cache=False), make(prefix_cache=False)
    move = Move(source, target, sampling)
    move.step(10)
    move.reserve(LENGTH)
    move.step(40)
    move.copy(source.exports.blocks("a"))
    if is_paused:
        assert move.stop()
    move.abort()
    move.chunks.clear()
    move.step(60)
    assert same(moved(move, 60, (70, 75)), expected)
    assert all_free(source, target)


def test_a_pause_that_is_taken_back_at_once_changes_nothing(make: Make):
    sampling = greedy(40, temperature=0.9, seed=10)
    expected = whole(make(), sampling)
    source = make()
    move = Move(source, source, sampling)
    for until in range(1, 40):
        move.step(until)
        if not move.is_over:
            assert source.exports.pause("a") and not source.exports.pause("a")
            source.exports.resume("a")
    assert same([*move.tokens, *move.rest(source, "a")], expected)
    assert all_free(source)


def test_an_answer_that_ends_while_it_is_paused_ends_once(make: Make):
    """The batch that was launched before the pause may draw its last token."""
    sampling = greedy(12)
    expected = whole(make(), sampling)
    source, target = make(prefix_cache=False), make(prefix_cache=False)
    for shown in range(1, 12):
        move = Move(source, target, sampling)
        move.step(shown)
        move.reserve(LENGTH)
        if move.stop():
            move.commit()
            assert same([*move.tokens, *move.rest(target, move.there)], expected)
        else:
            assert same(move.tokens, expected)
            move.abort()
        assert all_free(source, target)


def test_a_preempted_answer_moves_once_it_is_computed_again(folder: Path):
    sampling = greedy(60, temperature=0.9, seed=11)
    alone = load_engine(settings(model=str(folder)))
    expected = whole(alone, sampling)
    size = alone.layout.block_size
    source = load_engine(settings(model=str(folder), kv_cache_nbytes=9 * alone.layout.block_nbytes, prefix_cache=False))
    source.submit(request("older", OTHER, greedy(60)))
    move = Move(source, load_engine(settings(model=str(folder))), sampling)
    move.step(6)
    move.reserve(LENGTH)
    move.copy(source.exports.blocks("a"))
    assert move.chunks[0].num_tokens == 2 * size
    sequence = source.sequences["a"]
    while sequence.status is Status.RUNNING and not move.is_over:
        source.step()
        move.tokens = [Token(index, token) for index, token in enumerate(sequence.tokens[len(PROMPT) :])]
    assert sequence.status is Status.WAITING
    assert source.exports.blocks("a") is None and not source.exports.pause("a") and source.exports.tail("a") is None
    while sequence.status is Status.WAITING or not sequence.is_decoding:
        source.step()
        source.check()
    move.tokens = [Token(index, token) for index, token in enumerate(sequence.tokens[len(PROMPT) :])]
    assert move.stop()
    move.commit()
    assert same([*move.tokens, *move.rest(move.target, move.there)], expected)
    assert all_free(source, move.target)


def test_an_answer_that_is_preempted_after_its_move_is_computed_as_it_was(folder: Path):
    """Its first tokens came with the move's job, and were decoded all the same: to the bit, with `logprobs`."""
    sampling = greedy(2 * LENGTH, **SAMPLINGS["drawn"])
    source, target, alone = (load_engine(settings(model=str(folder), prefix_cache=False)) for _ in range(3))
    expected = whole(alone, sampling)
    move = Move(source, target, sampling)
    move.step(120)
    move.reserve(LENGTH)
    move.step(130)
    assert move.stop()
    move.commit()
    others = [move.target.step() for _ in range(30)]
    target.scheduler._preempt(target.sequences[move.there])
    others += drain(target)
    rest = [sampled.token for output in others for sampled in output.sampled]
    assert [*move.tokens, *rest] == expected
    assert target.stats().num_preemptions == 1


def test_what_was_told_is_held_until_its_reader_has_ended(make: Make):
    source = make(prefix_cache=False)
    move = Move(source, make(), greedy(LENGTH))
    move.step(1)
    move.reserve(LENGTH)
    move.step(95)
    chunk = source.exports.blocks("a")
    assert chunk is not None and source.exports.blocks("a") is None
    source.release("a")
    drain(source)
    source.check()
    held = len(chunk.blocks) * source.layout.block_size
    assert source.stats().free_tokens == source.capacity_tokens - held
    with pytest.raises(RequestError, match="is here already"):  # or the reader's hold would be forgotten
        source.submit(request("a", PROMPT, greedy()))
    source.exports.reader_ended("a")
    source.exports.reader_ended("a")
    assert all_free(source)


def test_pages_that_the_move_did_not_need_are_free_again(make: Make):
    source, target = make(prefix_cache=False), make(prefix_cache=False)
    move = Move(source, target, greedy(LENGTH))
    move.step(3)
    size = move.size
    reservation = move.reserve(6 * size)
    num_reserved = target.layout.num_blocks(len(PROMPT) + 3 + 6 * size)
    assert len(reservation.blocks) == num_reserved
    assert move.stop()
    move.target.adopt(move.there, move.tokens[-1], move.tokens[3:-1])
    assert target.capacity_tokens - target.stats().free_tokens >= num_reserved * size  # the writer may still write
    target.check()
    target.incoming_writer_ended(move.there)
    num_kept = target.layout.num_blocks(len(PROMPT) + len(move.tokens))
    assert target.capacity_tokens - target.stats().free_tokens == num_kept * size


@pytest.mark.parametrize(
    ("first", "drawn", "words"),
    [
        (Token(4, 5), [], "token 4 came with the handoff where token 3 was expected"),
        (Token(4, 5), [Token(2, 5)], "token 2 came with the handoff where token 3 was expected"),
        (Token(24, 5), [Token(index, 5) for index in range(3, 24)], r"62 tokens came, 3 KV blocks were reserved"),
        (Token(4, 5), [Token(3, 320)], "token 3 that came with the handoff is 320, outside of 0 to 319"),
    ],
)
def test_tokens_that_do_not_follow_or_fit_are_refused(folder: Path, first: Token, drawn: list[Token], words: str):
    target = load_engine(settings(model=str(folder)))
    asked = replace(request("a", [*PROMPT, 7, 8, 9], greedy(LENGTH)), num_answered=3)
    target.reserve(asked, num_tokens=44)
    with pytest.raises((Corrupt, RequestError), match=words):
        target.adopt("a", first, drawn)
    target.release("a")
    target.incoming_writer_ended("a")
    assert all_free(target)


def test_pages_are_wanted_for_what_is_known_and_for_no_more_than_a_context_has(folder: Path):
    target = load_engine(settings(model=str(folder)))
    for num_tokens in (len(PROMPT) - 1, target.max_model_len):
        with pytest.raises(RequestError, match=f"pages for {num_tokens} tokens of an answer that moves are wanted"):
            target.reserve(request("a", PROMPT, greedy()), num_tokens=num_tokens)
    small = load_engine(settings(model=str(folder), kv_cache_nbytes=5 * target.layout.block_nbytes))
    small.submit(request("beside", OTHER, greedy()))
    small.step()
    with pytest.raises(OutOfBlocks, match="5 KV blocks wanted, 3 of 5 available"):
        small.reserve(request("a", PROMPT, greedy()), num_tokens=79)
    small.release("a")
    assert all_free(target, small)


def test_kv_that_was_decoded_is_no_prefix_where_answers_are_computed_otherwise_than_prompts(folder: Path):
    source, target = (load_engine(settings(model=str(folder))) for _ in range(2))
    target._prefix_cache._caches_decoded_kv = False
    move = Move(source, target, greedy(LENGTH))
    moved(move, 60, (70,))
    assert target.stats().num_cached_blocks == len(PROMPT) // target.layout.block_size


def test_what_is_not_decoded_here_is_not_told(folder: Path):
    engine = load_engine(settings(model=str(folder), max_batched_tokens=16))
    for unknown in (engine.exports.blocks, engine.exports.pause, engine.exports.tail):
        with pytest.raises(KeyError):
            unknown("a")
    engine.exports.resume("a")
    engine.submit(request("a", PROMPT, greedy()))
    for _ in range(2):
        assert engine.exports.blocks("a") is None and not engine.exports.pause("a")
        engine.step()
    drain(engine)
    engine.submit(request("handed over", PROMPT, greedy(), handoff=True))
    drain(engine)
    assert engine.exports.blocks("handed over") is None and not engine.exports.pause("handed over")
