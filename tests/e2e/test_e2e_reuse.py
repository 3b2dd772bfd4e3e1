"""The next turn of a conversation finds the answer before it, whose KV decode computed, and says the same."""

import asyncio
import random
from pathlib import Path

import pytest

from bench.load.client import session
from bench.system.local_system import System, get_json, running
from engine.loader import load_engine
from tests.engine import driving
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # systems start one after another

BLOCK = 16
MAX_TOKENS = 40  # more than two blocks
FIRST = random.Random(3).choices(range(1000, 4000), k=300)
NEXT = random.Random(4).choices(range(1000, 4000), k=20)
# A format whose answers' KV is kept: what `auto` takes where kernels cannot be built would keep none.
NATIVE = {"TANDEM_DTYPE": "native", "TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "512"}


async def ask(system: System, prompt: list[int]) -> tuple[list[int], int]:
    """Return the greedy answer's tokens, and how many of the prompt's were not computed."""
    body = {"model": system.model(), "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    async with session() as http, http.post(f"{system.url}/v1/completions", json=body) as response:
        reply = await response.json()
        assert response.status == 200, reply
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["token_ids"], cached


def turns(system: System, between=lambda: None) -> list[tuple[list[int], int]]:
    """Return two turns of a conversation, the second of which begins with all of the first."""
    first = asyncio.run(ask(system, FIRST))
    between()
    return [first, asyncio.run(ask(system, [*FIRST, *first[0], *NEXT]))]


def health(worker: dict) -> dict:
    return get_json(f"{worker['url']}/health")["core"]


def counter(system: System, name: str) -> float:
    """Return the sum of a counter over the workers."""
    return sum(health(worker)["counters"].get(name, 0.0) for worker in system.workers())


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Return what an engine that computes all of it answers."""
    engine = load_engine(driving.settings(dtype="native", num_threads=1, kv_cache_nbytes=64 << 20))
    (first,) = driving.answers(engine, [FIRST], driving.greedy(MAX_TOKENS))
    return [first, *driving.answers(engine, [[*FIRST, *first, *NEXT]], driving.greedy(MAX_TOKENS))]


def test_through_a_store(alone: list[list[int]], tmp_path: Path) -> None:
    num_blocks = (len(FIRST) + MAX_TOKENS - 1) // BLOCK

    def all_stored() -> None:
        until(lambda: len(list(tmp_path.rglob("*.kv"))) >= num_blocks)

    with running(TANDEM_KV_STORE=f"file://{tmp_path}", **NATIVE) as system:
        (first, _), (second, cached) = turns(system, all_stored)
    assert [first, second] == alone
    assert cached == num_blocks * BLOCK


def test_from_the_worker_that_decoded(alone: list[list[int]]) -> None:
    with running(**NATIVE) as system:
        (first, _), (second, cached) = turns(system)
        assert counter(system, "kv_peer_failed") == 0
        assert [first, second] == alone
        assert cached == (len(FIRST) + MAX_TOKENS - 1) // BLOCK * BLOCK
        assert counter(system, "kv_peer_hit_blocks") == counter(system, "kv_peer_sent_blocks") > 0
        until(lambda: all(health(worker)["is_clean"] for worker in system.workers()))
