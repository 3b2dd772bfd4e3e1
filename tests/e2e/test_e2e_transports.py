"""Greedy tokens cross every transport unchanged: chunked, with prefix hits, many at once, two workers a side."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from bench.load.client import session
from bench.models.transformers_oracle import greedy
from bench.system.local_system import System, get_json, running
from tests.engine import tiny_models
from tests.waiting import until

pytestmark = pytest.mark.slow

PROMPTS = [random.Random(i).choices(range(2, 256), k=5 + 23 * i) for i in range(14)]
MAX_TOKENS = 24
CHUNKED = {"TANDEM_MAX_BATCHED_TOKENS": "32", "TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "64"}


@dataclass
class Reply:
    token_ids: list[int]
    logprobs: list[float]
    cached: int


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
        assert reply.token_ids == wanted.token_ids
        assert reply.logprobs == pytest.approx(wanted.logprobs, abs=5e-3)


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


@pytest.mark.parametrize(
    ("family", "transfer", "num_each"), [("llama", "ucx", 2), ("gpt_oss", "shm", 1), ("llama4", "tcp", 1)]
)
def test_a_pair_answers_as_transformers_does(tmp_path: Path, family: str, transfer: str, num_each: int) -> None:
    """The families with the most kinds of layers among them; tests/path has each over each transport."""
    reference = tiny_models.save_tiny(tmp_path, family)
    expected = [expected_reply(reference, prompt) for prompt in PROMPTS]
    workers = ("--prefill", str(num_each), "--decode", str(num_each))
    with running("--model", str(tmp_path), "--dtype", "float32", "--transfer", transfer, *workers, **CHUNKED) as pair:
        # Both ends of a link each way between all of them, before any request.
        until(lambda: links(pair) == ["up"] * (2 * num_each**2), words=lambda: links(pair))
        assert_same(asyncio.run(ask_all(pair)), expected)
        again = asyncio.run(ask_all(pair))
        assert_same(again, expected)
        assert sum(reply.cached for reply in again) > 0
        assert transports(pair) == {transfer}
        assert sum(counters(pair, "handoffs_committed")) == 2 * len(PROMPTS)
        for name in ("handoffs_committed", "kv_handoffs_received_committed"):  # every worker counts both sides
            assert sum(count > 0 for count in counters(pair, name)) == num_each


@torch.inference_mode()
def expected_reply(reference: PreTrainedModel, prompt: list[int]) -> Reply:
    answer = greedy(reference, prompt, MAX_TOKENS)
    logits = reference(torch.tensor([prompt + answer[:-1]]), logits_to_keep=MAX_TOKENS).logits[0]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
    return Reply(answer, logprobs, 0)
