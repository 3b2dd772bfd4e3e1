"""An answer begun elsewhere goes on as if it had never moved: same draws, same penalties, same end."""

# pyright: reportArgumentType=false
# Plain strings stand for request ids.

from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher

from contracts.errors import RequestError
from contracts.events import FinishReason
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import EngineRequest
from tests.engine.driving import drain, greedy, random_prompts, request, settings, tokens_of
from tests.engine.tiny_models import VOCAB

pytestmark = pytest.mark.slow

PROMPT = random_prompts(VOCAB, (37,))[0]
LENGTH = 40
CUTS = (1, 11, 12, 26, 27, 39)
"""Tokens of the answer that are there already. With the prompt's 37: also whole blocks of 16 and of 64, and one more or
one less.
"""

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.1, "seed": 5, "top_p": 0.9, "logprobs": 2},
    "penalised": {"temperature": 0.7, "seed": 6, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    "repeated": {"repetition_penalty": 1.8},
    "long enough": {"ignore_eos": False, "stop_token_ids": tuple(range(0, VOCAB, 2)), "min_tokens": 30},
    "bad words": {"bad_words": tuple((first, second) for first in range(0, VOCAB, 3) for second in range(0, VOCAB, 5))},
}


def rest_of(answer: list[int], num_answered: int, sampling, **changes: Any) -> EngineRequest:
    asked = request("again", [*PROMPT, *answer[:num_answered]], sampling)
    return replace(asked, num_answered=num_answered, **changes)


def whole(engine: Engine, sampling) -> tuple[list[int], list]:
    engine.submit(request("whole", PROMPT, sampling))
    outputs = drain(engine)
    return tokens_of(outputs, "whole"), [s.token for output in outputs for s in output.sampled]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_rest_is_that_of_the_whole_answer(make, name: str):
    sampling = greedy(LENGTH, **SAMPLINGS[name])
    alone = make(prefix_cache=False)
    answer, tokens = whole(alone, sampling)
    cuts = [cut for cut in CUTS if cut < len(answer)]
    assert len(cuts) > 3
    for engine in (alone, make(prefix_cache=True), make(max_batched_tokens=alone.layout.block_size)):
        for cut in cuts:
            engine.submit(rest_of(answer, cut, sampling))
            outputs = drain(engine)
            assert tokens_of(outputs, "again") == answer[cut:]
            sampled = [s.token for output in outputs for s in output.sampled]
            assert [token.index for token in sampled] == list(range(cut, len(answer)))
            for now, then in zip(sampled, tokens[cut:], strict=True):
                assert now.logprob == pytest.approx(then.logprob, abs=1e-4)
            (end,) = [end for output in outputs for end in output.ended]
            assert end.num_tokens == len(answer)


def test_it_may_wait_be_preempted_and_run_beside_others(make):
    """What is there already is no sign of a preemption, for which others would have to make room."""
    sampling = greedy(LENGTH, temperature=0.9, seed=2)
    answer, _ = whole(make(), sampling)
    engine = make(max_num_seqs=2)
    for index, prompt in enumerate(random_prompts(VOCAB, (20, 33), seed=4)):
        engine.submit(request(f"other {index}", prompt, greedy(30)))
    engine.step()
    engine.submit(rest_of(answer, 11, sampling))
    assert not engine.scheduler.has_preempted_before((9, 9))
    assert tokens_of(drain(engine), "again") == answer[11:]


def test_a_grammar_goes_on_where_it_was():
    engine = load_engine(settings(dtype="auto", kv_cache_nbytes=128 << 20))
    grammar = LLMatcher.grammar_from_regex(r"[a-f]{4}-[0-9]{6}-(yes|no)")
    sampling = greedy(60, grammar=grammar, ignore_eos=False, temperature=0.8, seed=7)
    answer, _ = whole(engine, sampling)
    for cut in range(1, len(answer) - 1, 3):
        engine.submit(rest_of(answer, cut, sampling))
        outputs = drain(engine)
        assert tokens_of(outputs, "again") == answer[cut:]
        assert [end.reason for output in outputs for end in output.ended] == [FinishReason.STOP]


@pytest.mark.parametrize("cut", CUTS[:-1])
def test_it_is_handed_over_like_a_prompt(folder, cut: int):
    """The first token of the attempt is drawn where the rest is computed, and decode goes on behind that."""
    sampling = greedy(LENGTH, temperature=0.8, seed=3, frequency_penalty=0.5)
    source, target = (load_engine(settings(model=str(folder), max_batched_tokens=budget)) for budget in (32, 512))
    answer, _ = whole(target, sampling)
    source.submit(rest_of(answer, cut, sampling, handoff=True))
    outputs = drain(source)
    (first,) = [s.token for output in outputs for s in output.sampled]
    assert (first.index, first.token_id) == (cut, answer[cut])
    chunks = [chunk for output in outputs for chunk in output.chunks]
    assert sum(chunk.num_tokens for chunk in chunks) == len(PROMPT) + cut
    reservation = target.reserve(rest_of(answer, cut, sampling))
    size = source.layout.block_size
    for chunk in chunks:
        start = max(chunk.first_token, reservation.skip_tokens)
        if start < chunk.first_token + chunk.num_tokens:
            pages = chunk.blocks[(start - chunk.first_token) // size :]
            into = reservation.blocks[start // size :][: len(pages)]
            target.pool_bytes[:, into] = source.pool_bytes[:, pages]
    target.adopt("again", first)
    target.incoming_writer_ended("again")
    source.release("again")
    assert [first.token_id, *tokens_of(drain(target), "again")] == answer[cut:]


def test_an_answer_without_a_prompt_is_refused(make):
    with pytest.raises(RequestError, match="empty"):
        make().submit(rest_of([1] * 5, len(PROMPT) + 5, greedy()))
