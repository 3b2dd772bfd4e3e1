"""Speculative decoding changes no answer, whatever is guessed: tokens are those without, and those of transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from contracts.errors import ConfigError
from contracts.events import Token
from contracts.sampling import SamplingParams
from engine.cpu import batch_inputs
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import StepOutput
from engine.speculative.choice import PROPOSERS
from tests.engine.driving import answers, drain, greedy, needs_bfloat16, random_prompts, request, settings, tokens_of
from tests.engine.speculative.drafting import KnowingProposer
from tests.engine.tiny_models import FAMILIES, VOCAB, save_answered, save_tiny

pytestmark = pytest.mark.slow

LENGTHS = (1, 5, 16, 17, 40, 150)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": 3},
    "asked logprobs": {"logprobs": 0, "logprob_token_ids": (5, 9)},
    "drawn": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 1.1, "seed": 5, "top_p": 0.9, "top_k": 40, "min_p": 0.001, "logprobs": 2},
    "second of two": {"temperature": 1.1, "seed": 5, "choice": 1},
    "penalised": {"temperature": 0.7, "seed": 6, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    "repeated": {"repetition_penalty": 1.8},
    "biased": {"logit_bias": {7: 4.0, 9: -100.0}},
    "long enough": {"ignore_eos": False, "stop_token_ids": tuple(range(0, VOCAB, 2)), "min_tokens": 37},
    "stopped": {"ignore_eos": False, "stop_token_ids": tuple(range(0, VOCAB, 9))},
    "bad words": {"bad_words": tuple((first, second) for first in range(0, VOCAB, 3) for second in range(0, VOCAB, 5))},
    "few tokens": {"allowed_token_ids": (5, 6, 7, 8, 9)},
    "grammar": {"grammar": LLMatcher.grammar_from_regex("([0-9]{2}-|[a-f]x){4,12}"), "ignore_eos": False},
}

Make = Callable[..., Engine]


@pytest.fixture
def knowing(monkeypatch: pytest.MonkeyPatch) -> type[KnowingProposer]:
    """A drafter that may be named in settings; what it knows is to be set."""
    monkeypatch.setitem(PROPOSERS, "knowing", KnowingProposer)
    return KnowingProposer


def told(outputs: Sequence[StepOutput], name: str) -> list[Token]:
    return [sampled.token for output in outputs for sampled in output.sampled if sampled.request_id == name]


def whole(engine: Engine, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[list[Token]]:
    for index, prompt in enumerate(prompts):
        engine.submit(request(str(index), prompt, sampling))
    outputs = drain(engine)
    return [told(outputs, str(index)) for index in range(len(prompts))]


def learn(knowing: type[KnowingProposer], prompts: Sequence[list[int]], expected: Sequence[Sequence[int]]) -> None:
    knowing.answers = {tuple(prompt): list(answer) for prompt, answer in zip(prompts, expected, strict=True)}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request, tmp_path_factory):
    """The shared one, of each family."""
    return save_answered(tmp_path_factory.mktemp(request.param), request.param, LENGTHS)


def test_greedy_answers_equal_transformers(family, knowing):
    folder, prompts, expected = family
    learn(knowing, prompts, expected)
    for changes in ({}, {"max_batched_tokens": 48, "max_mixed_tokens": 16, "max_num_seqs": 3}):
        engine = load_engine(settings(model=str(folder), speculate="knowing", adapts_drafts=False, **changes))
        for _ in range(2):  # the second time with prefix hits
            assert answers(engine, prompts, greedy()) == expected
        stats = engine.stats()
        assert 0 < sum(stats.num_accepted_by_place) < stats.num_draft_tokens


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_whatever_a_request_asks_for_its_tokens_are_those_without(folder: Path, knowing, kind: str):
    """The same seed gives the same answer, drawn or not, with the same log-probabilities to the bit."""
    prompts = random_prompts(VOCAB, LENGTHS)
    sampling = greedy(40, **SAMPLINGS[kind])
    plain = whole(load_engine(settings(model=str(folder))), prompts, sampling)
    learn(knowing, prompts, [[token.token_id for token in answer] for answer in plain])
    engine = load_engine(settings(model=str(folder), speculate="knowing", draft_tokens=4, adapts_drafts=False))
    assert whole(engine, prompts, sampling) == plain
    stats = engine.stats()
    assert 0 < sum(stats.num_accepted_by_place) < stats.num_draft_tokens
    assert [whole(engine, [prompt], sampling)[0] for prompt in prompts] == plain, "alone as in a batch"


@pytest.mark.parametrize(
    "dtype", ["float16", *(pytest.param(d, marks=needs_bfloat16) for d in ("bfloat16", "mixed16"))]
)
def test_rounded_formats_answer_the_same_as_well(folder: Path, knowing, dtype: str):
    prompts = random_prompts(VOCAB, LENGTHS)
    chosen = settings(model=str(folder), dtype=dtype, num_threads=2)
    plain = answers(load_engine(chosen), prompts, greedy(40))
    learn(knowing, prompts, plain)
    changes = {"speculate": "knowing", "adapts_drafts": False, "dtype": dtype, "num_threads": 2}
    assert answers(load_engine(settings(model=str(folder), **changes)), prompts, greedy(40)) == plain


@pytest.mark.parametrize("name", ["ngram", "suffix", "auto"])
@pytest.mark.parametrize("adapts", [False, True])
def test_drafters_without_weights_change_nothing(folder: Path, name: str, adapts: bool):
    """Greedy answers of a random model run into circles, which are guessed."""
    prompts = [prompt * 2 for prompt in random_prompts(VOCAB, LENGTHS)]
    plain = answers(load_engine(settings(model=str(folder))), prompts, greedy(80))
    engine = load_engine(settings(model=str(folder), speculate=name, adapts_drafts=adapts))
    assert answers(engine, prompts, greedy(80)) == plain
    assert sum(engine.stats().num_accepted_by_place) > 0


def test_a_right_draft_takes_fewer_steps_and_is_told_of(folder: Path, knowing, monkeypatch):
    monkeypatch.setattr(knowing, "wrong", 0.0)
    (prompt,) = random_prompts(VOCAB, [9])
    (plain,) = answers(load_engine(settings(model=str(folder))), [prompt], greedy(41))
    learn(knowing, [prompt], [plain])
    engine = load_engine(settings(model=str(folder), speculate="knowing", adapts_drafts=False))
    engine.submit(request("0", prompt, greedy(41)))
    outputs = drain(engine)
    assert tokens_of(outputs, "0") == plain
    assert len(outputs) == 1 + 10, "the prompt, and 40 tokens in steps of one and three drafted ones"
    verified = [each for output in outputs for each in output.verified]
    assert [(each.num_tokens, each.num_accepted) for each in verified] == [(3, 3)] * 10
    assert [output.num_decode_tokens for output in outputs] == [0] + [4] * 10
    assert engine.stats().num_accepted_by_place == (10, 10, 10)


def test_a_request_may_do_without(folder: Path, knowing):
    prompts = random_prompts(VOCAB, [9, 9])
    plain = answers(load_engine(settings(model=str(folder))), prompts, greedy(20))
    learn(knowing, prompts, plain)
    engine = load_engine(settings(model=str(folder), speculate="knowing", adapts_drafts=False))
    assert answers(engine, prompts, greedy(20, speculate=False)) == plain
    assert engine.stats().num_drafts == 0


def test_an_answer_ends_within_a_draft_where_it_would_end_without(folder: Path, knowing, monkeypatch):
    """A stop token was drafted, with right tokens behind it that nobody gets."""
    monkeypatch.setattr(knowing, "wrong", 0.0)
    prompts = random_prompts(VOCAB, [9, 30])
    plain = answers(load_engine(settings(model=str(folder))), prompts, greedy(40))
    learn(knowing, prompts, plain)
    engine = load_engine(settings(model=str(folder), speculate="knowing", draft_tokens=7, adapts_drafts=False))
    for stop in range(2, 12):
        sampling = greedy(40, stop_token_ids=(plain[0][stop],))
        (answer,) = answers(engine, prompts[:1], sampling)
        assert answer == plain[0][: plain[0].index(plain[0][stop]) + 1]


def test_preempted_answers_are_the_same(folder: Path, knowing):
    prompts = random_prompts(VOCAB, LENGTHS[:5])
    layout = load_engine(settings(model=str(folder))).layout
    plain = answers(load_engine(settings(model=str(folder))), prompts, greedy(100))
    learn(knowing, prompts, plain)
    few = {"kv_cache_nbytes": 21 * layout.block_nbytes}
    engine = load_engine(settings(model=str(folder), speculate="knowing", draft_tokens=7, adapts_drafts=False, **few))
    assert answers(engine, prompts, greedy(100)) == plain
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.num_accepted_by_place[0] > 0
    assert stats.free_tokens == engine.capacity_tokens


def test_no_answer_gives_its_pages_up_for_a_draft(folder: Path, knowing):
    """With room for all answers and none to spare nobody is preempted, and drafts are cut to the room there is."""
    prompts = random_prompts(VOCAB, [16, 16, 16])
    layout = load_engine(settings(model=str(folder))).layout
    plain = answers(load_engine(settings(model=str(folder))), prompts, greedy(32))
    learn(knowing, prompts, plain)
    few = {"kv_cache_nbytes": 9 * layout.block_nbytes, "prefix_cache": False}
    engine = load_engine(settings(model=str(folder), speculate="knowing", draft_tokens=7, adapts_drafts=False, **few))
    assert answers(engine, prompts, greedy(32)) == plain
    assert engine.stats().num_preemptions == 0


def test_rejected_tokens_never_enter_the_prefix_cache(folder: Path, knowing, monkeypatch):
    """With drafts that are all wrong, what is cached is found for the answer's own text, and answers right."""
    (prompt,) = random_prompts(VOCAB, [21])
    (plain,) = answers(load_engine(settings(model=str(folder))), [prompt], greedy(60))
    learn(knowing, [prompt], [plain])
    monkeypatch.setattr(knowing, "wrong", 1.0)
    engine = load_engine(settings(model=str(folder), speculate="knowing", draft_tokens=7, adapts_drafts=False))
    assert answers(engine, [prompt], greedy(60)) == [plain]
    assert sum(engine.stats().num_accepted_by_place) == 0
    before = engine.stats().prefix_hit_tokens
    for length in range(1, 40, 5):
        longer = [*prompt, *plain[:length]]
        assert answers(engine, [longer], greedy(20)) == [plain[length : length + 20]]
    assert engine.stats().prefix_hit_tokens > before


def test_the_longest_context_is_not_left(folder: Path, knowing, monkeypatch):
    monkeypatch.setattr(knowing, "wrong", 0.0)
    (prompt,) = random_prompts(VOCAB, [9])
    limits = {"max_model_len": 40}
    (plain,) = answers(load_engine(settings(model=str(folder), **limits)), [prompt], greedy(100))
    learn(knowing, [prompt], [[*plain, 1, 2, 3, 4]])
    engine = load_engine(settings(model=str(folder), speculate="knowing", adapts_drafts=False, **limits))
    assert answers(engine, [prompt], greedy(100)) == [plain]
    assert len(prompt) + len(plain) == 40


def test_a_token_that_can_not_be_drawn_within_a_draft_fails_that_request_alone(folder: Path, knowing, monkeypatch):
    prompts = random_prompts(VOCAB, [9, 12])
    plain = answers(load_engine(settings(model=str(folder))), prompts, greedy(20))
    learn(knowing, prompts, plain)
    monkeypatch.setattr(knowing, "wrong", 0.0)
    engine = load_engine(settings(model=str(folder), speculate="knowing", adapts_drafts=False))
    engine.submit(request("0", prompts[0], greedy(20)))
    engine.submit(request("1", prompts[1], greedy(20)))
    collect, failing = engine.sampler.sample_each, "1"

    def broken(sequences, logits, masks, guesses):
        found = collect(sequences, logits, masks, guesses)
        return [
            "it is broken" if s.request_id == failing and s.num_generated == 6 else token
            for s, token in zip(sequences, found, strict=True)
        ]

    monkeypatch.setattr(engine.sampler, "sample_each", broken)
    outputs = drain(engine)
    assert tokens_of(outputs, "0") == plain[0]
    assert tokens_of(outputs, "1") == plain[1][:6], "the tokens before are right"
    assert [failure.request_id for output in outputs for failure in output.failed] == ["1"]
    assert [ended.request_id for output in outputs for ended in output.ended] == ["0"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculate": "eagle"}, "speculate is 'eagle'; it may be auto, off, ngram, suffix"),
        ({"speculate": "ngram", "draft_tokens": 0}, "draft_tokens is 0; a draft has 1 token at least"),
        ({"synthetic_acceptance": 2.0}, "synthetic_acceptance needs drafts, and speculate is 'off'"),
        ({"speculate": "ngram", "synthetic_acceptance": 4.5}, "is 4.5; a round with draft_tokens 3 gives 1 to 4"),
        ({"speculate": "ngram", "synthetic_acceptance": 0.5}, "is 0.5; a round with draft_tokens 3 gives 1 to 4"),
    ],
)
def test_what_can_not_draft_is_refused_by_the_name_of_the_field(folder: Path, changes, words):
    with pytest.raises(ConfigError, match=words):
        load_engine(settings(model=str(folder), **changes))


@pytest.mark.parametrize("length", [1.0, 2.4, 4.0])
def test_synthetic_acceptance_keeps_so_many_tokens_whatever_the_model_says(folder: Path, knowing, monkeypatch, length):
    prompts = random_prompts(VOCAB, [9] * 16)
    learn(knowing, prompts, answers(load_engine(settings(model=str(folder))), prompts, greedy(100)))
    monkeypatch.setattr(knowing, "wrong", 1.0)
    engine = load_engine(
        settings(model=str(folder), speculate="knowing", adapts_drafts=False, synthetic_acceptance=length)
    )
    assert [len(answer) for answer in answers(engine, prompts, greedy(100))] == [100] * 16
    stats = engine.stats()
    assert engine.layout.shared_id != load_engine(settings(model=str(folder))).layout.shared_id, (
        "its KV is not the text's"
    )
    # A draft of three has room for them all; the last one or two of an answer are cut.
    assert sum(stats.num_accepted_by_place) / stats.num_drafts == pytest.approx(length - 1.0, abs=0.1)


@pytest.mark.parametrize("alike", [True, False])
def test_long_contexts_and_windows_are_verified_to_the_bit(tmp_path: Path, knowing, alike: bool, monkeypatch):
    """Drafts whose tokens lie in two parts of the context, in a model with windows, sinks and experts."""
    save_tiny(tmp_path, "gpt_oss")
    monkeypatch.setattr(batch_inputs, "computes_rows_alike", lambda dtype, head_dim: alike)
    prompts = random_prompts(VOCAB, (120, 126, 127, 128, 250, 30))
    sampling = greedy(20, logprobs=2)
    plain = whole(load_engine(settings(model=str(tmp_path))), prompts, sampling)
    learn(knowing, prompts, [[token.token_id for token in answer] for answer in plain])
    engine = load_engine(settings(model=str(tmp_path), speculate="knowing", draft_tokens=5, adapts_drafts=False))
    assert whole(engine, prompts, sampling) == plain
    assert sum(engine.stats().num_accepted_by_place) > 0
