"""The default model: greedy answers equal to transformers, and the same whatever else runs."""

import pytest
import torch

from bench.models.transformers_oracle import greedy as oracle_greedy
from bench.models.transformers_oracle import oracle
from checkpoint import open_checkpoint
from contracts.errors import ConfigError, Overloaded, RequestError
from contracts.events import FinishReason
from engine.engine import Engine
from engine.loader import load_engine
from engine.sampling.host_sampler import Sampler
from tests.e2e.tiny import save_tiny
from tests.engine.driving import answers, drain, greedy, needs_bfloat16, request, settings, tokens_of

pytestmark = pytest.mark.slow

QUESTIONS = ("What is the capital of France?", "Why is the sky blue?", "def fibonacci(n):", "cats and dogs " * 40)
NUM_TOKENS = 16
NUM_TOKENS_OF_EACH_DTYPE = 5
"""Enough for the real model's widths, as probabilities are compared to the bit; test_batch.py has longer answers."""


def chat(checkpoint, text: str) -> list[int]:
    turns = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return checkpoint.tokenizer().encode(turns).ids


def with_logprobs(engine: Engine, prompts: list[list[int]]) -> list[list[tuple[int, float | None]]]:
    """Return the tokens of answers in one batch, with their log-probabilities."""
    for index, prompt in enumerate(prompts):
        engine.submit(request(str(index), prompt, greedy(NUM_TOKENS_OF_EACH_DTYPE, logprobs=0)))
    sampled = [one for output in drain(engine) for one in output.sampled]
    names = [str(index) for index in range(len(prompts))]
    return [[(one.token.token_id, one.token.logprob) for one in sampled if one.request_id == name] for name in names]


@pytest.fixture(scope="module")
def prompts():
    checkpoint = open_checkpoint("default")
    return [chat(checkpoint, question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return load_engine(settings(dtype="auto", kv_cache_nbytes=256 << 20, cache_dir=tmp_path_factory.mktemp("cache")))


def test_float32_answers_equal_transformers(prompts):
    engine = load_engine(settings(kv_cache_nbytes=256 << 20, max_batched_tokens=128))
    reference = oracle(engine.checkpoint)
    assert answers(engine, prompts, greedy(NUM_TOKENS)) == [oracle_greedy(reference, p, NUM_TOKENS) for p in prompts]


@pytest.mark.parametrize(
    "dtype",
    ["native", "float16", *(pytest.param(dtype, marks=needs_bfloat16) for dtype in ("mixed16", "mixed4", "bfloat16"))],
)
def test_answers_do_not_depend_on_the_batch_or_the_chunks(prompts, dtype):
    whole = load_engine(settings(dtype=dtype, kv_cache_nbytes=128 << 20))
    chunked = load_engine(settings(dtype=dtype, kv_cache_nbytes=128 << 20, max_batched_tokens=48, max_num_seqs=3))
    together = with_logprobs(whole, prompts)
    assert [with_logprobs(whole, [prompt])[0] for prompt in prompts] == together
    assert with_logprobs(chunked, prompts) == together


def test_an_answer_ends_at_the_models_own_end(engine, prompts):
    engine.submit(request("a", prompts[0], greedy(NUM_TOKENS, ignore_eos=False)))
    outputs = drain(engine)
    ended = [end for output in outputs for end in output.ended]
    assert engine.checkpoint.tokenizer().decode(tokens_of(outputs, "a")) == "The capital of France is Paris."
    assert [(end.num_tokens, end.reason) for end in ended] == [(8, FinishReason.STOP)]


def test_seeds_repeat_and_choices_differ(engine, prompts):
    drawn = greedy(NUM_TOKENS, temperature=1.0, seed=11)
    first, second = answers(engine, [prompts[1], prompts[1]], drawn)
    other = answers(engine, [prompts[1]], greedy(NUM_TOKENS, temperature=1.0, seed=11, choice=1))[0]
    assert first == second != other


def test_a_prompt_longer_than_the_context_names_both_numbers(engine):
    with pytest.raises(RequestError, match=r"has 9000 tokens; the longest .* has \d+ \(context of \d+\)") as caught:
        engine.submit(request("long", [5] * 9000, greedy()))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("token_ids", [[], [49152], [5, -1], [1 << 31], [-(1 << 31) - 1, 5], [1 << 70]])
def test_prompts_that_are_none_are_refused(engine, token_ids):
    with pytest.raises(RequestError):
        engine.submit(request("none", token_ids, greedy()))


def test_a_full_queue_is_overload():
    engine = load_engine(settings(dtype="auto", max_num_waiting=1, kv_cache_nbytes=64 << 20))
    engine.submit(request("a", [5, 6], greedy()))
    with pytest.raises(Overloaded, match="1 requests are waiting"):
        engine.submit(request("b", [5, 6], greedy()))


def test_the_context_bounds_an_answer():
    engine = load_engine(settings(dtype="auto", max_model_len=40, kv_cache_nbytes=64 << 20))
    engine.submit(request("a", [5] * 30, greedy(1000)))
    ended = [end for output in drain(engine) for end in output.ended]
    assert [(end.num_tokens, end.reason) for end in ended] == [(10, FinishReason.LENGTH)]


def test_a_request_whose_token_can_not_be_drawn_fails_alone(engine, prompts, monkeypatch):
    wishes_of = Sampler._processor_state

    def refuse(sampler, sequence, vocab):
        if sequence.request_id == "bad":
            raise IndexError("no such token")
        return wishes_of(sampler, sequence, vocab)

    plain, biased = greedy(6), greedy(6, logit_bias={5: 2.0})
    expected = [*answers(engine, prompts[:1], plain), *answers(engine, prompts[1:2], biased)]
    monkeypatch.setattr(Sampler, "_processor_state", refuse)
    for name, prompt, sampling in (("a", prompts[0], plain), ("bad", [7, 7], biased), ("b", prompts[1], biased)):
        engine.submit(request(name, prompt, sampling))
    outputs = drain(engine)
    assert [tokens_of(outputs, name) for name in "ab"] == expected
    assert [(f.request_id, f.code) for o in outputs for f in o.failed] == [("bad", "internal")]
    engine.check()


def test_a_request_that_fails_fails_alone(engine, prompts):
    forward = engine.runner.forward

    def refuse_seven(pieces, *_):
        if any(7 in piece.sequence.tokens[: piece.sequence.num_prompt][:1] for piece in pieces):
            raise RuntimeError("seven")
        return forward(pieces)

    expected = answers(engine, prompts[:2], greedy(6))
    engine.runner.forward = refuse_seven
    try:
        for name, prompt in (("a", prompts[0]), ("bad", [7, 7]), ("b", prompts[1])):
            engine.submit(request(name, prompt, greedy(6)))
        outputs = drain(engine)
    finally:
        engine.runner.forward = forward
    assert [tokens_of(outputs, name) for name in "ab"] == expected
    assert [(f.request_id, f.code) for o in outputs for f in o.failed] == [("bad", "internal")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float17"}, "dtype 'float17' is not supported; supported are auto, native, float32"),
        ({"device": "tpu"}, "device 'tpu' is not supported; supported are auto, cpu, cuda and cuda:N"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2, on the CPU; it is for GPUs: set device"),
        ({"max_model_len": 9000}, "max_model_len is 9000; SmolLM2-135M-Instruct was trained for 8192"),
        (
            {"max_model_len": 8000, "kv_cache_nbytes": 64 << 20},
            "the KV cache holds 1456 tokens: raise kv_cache_nbytes, a worker's kv_cache_mib, TANDEM_KV_CACHE_MIB",
        ),
        ({"block_size": 24}, "block_size is 24; it must be a power of 2 up to 64"),
        ({"block_size": 128}, "block_size is 128; it must be a power of 2 up to 64"),
        (
            {"max_batched_tokens": 15},
            "max_batched_tokens is 15; a step needs room for a block of a prompt, 16 tokens",
        ),
        ({"max_mixed_tokens": 15}, "max_mixed_tokens is 15; a step needs room for a block of a prompt, 16 tokens"),
        (
            {"kv_cache_nbytes": 1 << 50},
            r"kv_cache_nbytes is 1125899906842624; \d+ are available: lower it, a worker's kv_cache_mib, TANDEM_KV",
        ),
        (
            {"kv_cache_nbytes": 1},
            r"kv_cache_nbytes is 1; one block of 16 tokens takes \d+: raise it, a worker's kv_cache_mib, TANDEM_KV",
        ),
    ],
)
def test_settings_that_cannot_be_met_say_why(changes, words):
    with pytest.raises(ConfigError, match=words):
        load_engine(settings(**changes))


def test_a_context_that_is_shorter_than_the_models_is_told(caplog):
    engine = load_engine(settings(kv_cache_nbytes=64 << 20))
    assert engine.max_model_len < 8192
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    words = f"contexts have at most {engine.max_model_len} tokens, where SmolLM2-135M-Instruct has 8192"
    assert warning.startswith(words) and "TANDEM_KV_CACHE_MIB" in warning


def test_gpus_that_are_not_there_are_missed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="tensor_parallel is 2 from cuda:1 on; torch finds 2 GPUs"):
        load_engine(settings(device="cuda:1", tensor_parallel=2))
    with pytest.raises(ConfigError, match="'cuda:2' is not there; the GPUs that torch finds are cuda:0 to cuda:1"):
        load_engine(settings(device="cuda:2"))


def test_progress_goes_from_nothing_to_all(tiny):
    seen = []
    load_engine(settings(model=tiny, dtype="float16"), lambda *step: seen.append(step))
    assert seen[0] == ("resolve", 0, 1) and seen[-1] == ("load", 2, 2)


@pytest.mark.parametrize(("dtype", "num_hits"), [("float16", 48), pytest.param("mixed16", 32, marks=needs_bfloat16)])
def test_an_answer_is_a_cached_prefix_only_where_a_prompt_would_be_computed_alike(tiny, dtype, num_hits):
    engine = load_engine(settings(model=tiny, dtype=dtype))
    prompt = list(range(40))
    answer = answers(engine, [prompt], greedy(20))[0]
    answers(engine, [prompt + answer], greedy(2))
    assert engine.stats().prefix_hit_tokens == num_hits
