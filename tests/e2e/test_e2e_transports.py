"""Greedy tokens cross every transport unchanged: chunked, with prefix hits, many at once, two workers a side."""

import asyncio
import random
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from bench.load.client import session
from bench.models.transformers_oracle import greedy
from bench.system.local_system import System, get_json, running
from tests.e2e.tiny import save_tiny
from tests.engine import tiny_models
from tests.waiting import until

pytestmark = pytest.mark.slow

PROMPTS = [random.Random(i).choices(range(2, 256), k=5 + 23 * i) for i in range(14)]
MAX_TOKENS = 24
CHUNKED = {"TANDEM_MAX_BATCHED_TOKENS": "32", "TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "64"}
TRANSFERS = ["ucx", "shm", "tcp"]


@dataclass
class Reply:
    token_ids: list[int]
    logprobs: list[float]
    cached: int


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def colocated(model) -> list[Reply]:
    """What one mixed worker answers."""
    flags = ("--model", model, "--dtype", "float32", "--prefill", "0", "--decode", "0", "--mixed", "1")
    with running(*flags, **CHUNKED) as alone:
        replies = asyncio.run(ask_all(alone))
        assert sum(reply.cached for reply in replies) == 0
        return replies


async def ask_all(system: System) -> list[Reply]:
    async with session() as http:
        model = system.model()

        async def ask(prompt: list[int]) -> Reply:
            body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
            body |= {"skip_special_tokens": False, "logprobs": 0, "return_token_ids": True}
            async with http.post(f"{system.url}/v1/completions", json=body) as response:
                reply = await response.json()
                assert response.status == 200, reply
                (choice,) = reply["choices"]
                cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                return Reply(choice["token_ids"], choice["logprobs"]["token_logprobs"], cached)

        return await asyncio.gather(*(ask(prompt) for prompt in PROMPTS))


def assert_same(replies: list[Reply], expected: list[Reply]) -> None:
    for reply, wanted in zip(replies, expected, strict=True):
        assert len(reply.token_ids) == MAX_TOKENS
        assert reply.token_ids == wanted.token_ids
        assert reply.logprobs == pytest.approx(wanted.logprobs, abs=2e-3)


def counters(system: System, name: str) -> list[float]:
    found = (get_json(f"{worker['url']}/health")["core"]["counters"] for worker in system.workers())
    return [value[name] for value in found if name in value]


def links(system: System) -> list[str]:
    """States, of both ends."""
    health = [get_json(f"{worker['url']}/health")["core"] for worker in system.workers()]
    return [link["state"] for core in health if core for link in core["links"]]


def transports(system: System) -> set[str]:
    health = [get_json(f"{worker['url']}/health") for worker in system.workers()]
    return {link["transport"] for worker in health for link in worker["core"]["links"]}


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_the_pair_answers_as_one_worker_does(model, colocated, transfer):
    flags = ("--model", model, "--dtype", "float32", "--transfer", transfer, "--prefill", "2", "--decode", "2")
    with running(*flags, **CHUNKED) as pair:
        until(lambda: links(pair) == ["up"] * 8, words=lambda: links(pair))  # before any request
        assert_same(asyncio.run(ask_all(pair)), colocated)
        again = asyncio.run(ask_all(pair))
        assert_same(again, colocated)
        assert sum(reply.cached for reply in again) > 0
        assert transports(pair) == {transfer}
        assert sum(counters(pair, "handoffs_committed")) == 2 * len(PROMPTS)
        for name in ("handoffs_committed", "kv_handoffs_received_committed"):  # every worker counts both sides
            assert sum(count > 0 for count in counters(pair, name)) == 2


@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_a_family_through_the_pair_is_what_transformers_says(tmp_path, family):
    """Those with the most kinds of layers, by the default transport.

    tests/path has each family over each transport, without the processes.
    """
    reference = tiny_models.save_tiny(tmp_path, family)
    with running("--model", str(tmp_path), "--dtype", "float32", **CHUNKED) as pair:
        replies = asyncio.run(ask_all(pair))
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        answer = greedy(reference, prompt, MAX_TOKENS)
        assert reply.token_ids == answer
        assert reply.logprobs == pytest.approx(expected_logprobs(reference, prompt, answer), abs=5e-3)


@torch.inference_mode()
def expected_logprobs(reference: PreTrainedModel, prompt: list[int], answer: list[int]) -> list[float]:
    logits = reference(torch.tensor([prompt + answer[:-1]]), logits_to_keep=MAX_TOKENS).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
