"""A prompt's own log-probabilities through real processes: the pair's are one worker's, and both are transformers'."""

import random
from collections.abc import Iterator

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from bench.system.local_system import System, running
from tests.engine import tiny_models

pytestmark = pytest.mark.slow

PROMPTS = [random.Random(length).choices(range(2, 256), k=length) for length in (1, 2, 33, 150)]
COUNT = 3
TOLERANCE = 5e-3
"""The error of a log-probability in float32 with sums in another order, through three layers of a random model."""
CHUNKED = {"TANDEM_MAX_BATCHED_TOKENS": "64", "TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "64"}
WORKERS = {"pair": (), "mixed": ("--prefill", "0", "--decode", "0", "--mixed", "1")}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[str, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("tiny")
    return str(folder), tiny_models.save_tiny(folder, "qwen3")


@pytest.fixture(scope="module", params=WORKERS)
def served(model, request) -> Iterator[System]:
    with running("--model", model[0], "--dtype", "float32", *WORKERS[request.param], **CHUNKED) as system:
        yield system


def completions(system: System, **fields) -> dict:
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    reply = httpx.post(f"{system.url}/v1/completions", json=body | fields, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@torch.inference_mode()
def reference_logprobs(reference: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return reference(torch.tensor([prompt])).logits[0].log_softmax(-1)


def test_prompt_logprobs_are_those_of_transformers(model, served):
    for _ in range(2):  # the second time the prefix is cached
        choices = completions(served, prompt=PROMPTS, prompt_logprobs=COUNT)["choices"]
        for prompt, choice in zip(PROMPTS, choices, strict=True):
            first, *others = choice["prompt_logprobs"]
            assert first is None and len(others) == len(prompt) - 1
            logprobs_TV = reference_logprobs(model[1], prompt)
            for token_id, entries, logprobs_V in zip(prompt[1:], others, logprobs_TV, strict=False):
                assert len(entries) in (COUNT, COUNT + 1)
                for key, entry in entries.items():
                    assert entry["logprob"] == pytest.approx(float(logprobs_V[int(key)]), abs=TOLERANCE)
                best = max(entries.values(), key=lambda entry: entry["logprob"])
                assert best["rank"] == 1
                own = entries[str(token_id)]
                assert own["rank"] == pytest.approx(1 + int((logprobs_V > logprobs_V[token_id]).sum()), abs=1)


def test_a_text_is_scored_as_a_harness_does_it(model, served):
    """lm-evaluation-harness sums token_logprobs[context:-1] of an echo with one token after it."""
    prompt = PROMPTS[-1]
    (echoed,) = completions(served, prompt=prompt, echo=True, logprobs=1, max_tokens=1)["choices"]
    (scored,) = completions(served, prompt=prompt, echo=True, logprobs=1, max_tokens=0)["choices"]
    rows = reference_logprobs(model[1], prompt)[:-1]
    expected = rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    for choice, last in ((echoed, -1), (scored, None)):
        found = choice["logprobs"]["token_logprobs"][1:last]
        assert found == pytest.approx(expected.tolist(), abs=TOLERANCE)
        assert [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:last]] == pytest.approx(
            rows.max(-1).values.tolist(), abs=TOLERANCE
        )
    assert echoed["logprobs"]["tokens"][:-1] == scored["logprobs"]["tokens"]


def test_answers_do_not_depend_on_being_scored(served):
    plain = completions(served, prompt=PROMPTS, logprobs=0)["choices"]
    scored = completions(served, prompt=PROMPTS, logprobs=0, prompt_logprobs=COUNT)["choices"]
    assert [choice["logprobs"]["tokens"] for choice in plain] == [choice["logprobs"]["tokens"] for choice in scored]


def test_a_salt_hides_a_prefix_on_every_worker(served):
    prompt = random.Random(5).choices(range(2, 256), k=100)
    cached = [
        completions(served, prompt=prompt, **salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"})
    ]
    assert cached == [0, 96, 0, 96, 0]


def test_embeddings_are_those_of_transformers(model, served):
    """The worker that computes a prompt gives them, and the other one lets go of what it was told to expect."""
    for _ in range(2):  # the second time the prefix is cached
        reply = httpx.post(f"{served.url}/v1/embeddings", json={"input": PROMPTS}, timeout=60)
        assert reply.status_code == 200, reply.text
        for prompt, item in zip(PROMPTS, reply.json()["data"], strict=True):
            with torch.inference_mode():
                expected = model[1].model(torch.tensor([prompt])).last_hidden_state[0, -1]
            expected = expected / expected.norm()
            assert item["embedding"] == pytest.approx(expected.tolist(), abs=1e-4)
