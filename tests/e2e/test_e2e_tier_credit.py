"""A conversation that a cache has lost goes back to the worker whose host memory has it, and is loaded there."""

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from redis import Redis

from bench.load.client import session
from bench.system.local_system import System, get_json, running
from coordinator.store.local_server import RedisServer
from tests.e2e.tiny import save_tiny
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK = 16
DRAWN = random.Random(5)
CONVERSATION = DRAWN.choices(range(256), k=1480)
"""A prompt of 23 of placement's blocks of 64, and no more."""
OTHERS = [DRAWN.choices(range(256), k=1408) for _ in range(6)]
"""More than the cache of a worker, and than what placement takes for a cache's worth of prompts."""
NUM_MARKS = 7 * 9
"""Prefixes at whose depths placement looks, of seven prompts of 22 or 23 blocks of 64."""
SHORT = DRAWN.choices(range(256), k=20)
"""Its worker tells whether the gateway knows of a role that has changed: of equals the first by name is taken."""
NEXT = DRAWN.choices(range(256), k=24)
QUICK = {"TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "1", "TANDEM_KV_HOST_GIB": "0.3"}


async def ask(system: System, prompt: list[int], max_tokens: int = 1) -> tuple[list[int], int]:
    """Return the greedy answer's tokens, and how many of the prompt's were not computed."""
    body = {"model": system.model(), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    async with session() as http, http.post(f"{system.url}/v1/completions", json=body) as response:
        reply = await response.json()
        assert response.status == 200, reply
    return reply["choices"][0]["token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def turn(system: System, worker: str, role: str) -> None:
    command = [sys.executable, "-m", "tandem", "role", worker, role, "--port", str(system.port)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def counters(system: System, name: str) -> dict[str, float]:
    (worker,) = (worker for worker in system.workers() if worker["id"] == name)
    return get_json(f"{worker['url']}/health")["core"]["counters"]


def computed(system: System, name: str) -> float:
    """Return the tokens of prompts that a worker has computed."""
    return counters(system, name)["prefill_tokens"]


def num_loads(system: System) -> float:
    """Return how many answers' time accounts say that a tier was asked."""
    lines = httpx.get(f"{system.url}/metrics", timeout=30).text.splitlines()
    wanted = (
        line for line in lines if line.startswith("tandem_gateway_stage_seconds_count") and 'stage="load"' in line
    )
    return sum(float(line.rsplit(" ", 1)[1]) for line in wanted)


def num_marks(url: str) -> int:
    """Return of how many prefixes the registry has been told who holds them."""
    with Redis.from_url(url) as redis:
        return sum(1 for _ in redis.scan_iter("*:held:*", count=1000))


def test_the_next_turn_is_loaded_where_host_memory_has_the_conversation(tmp_path: Path) -> None:
    """The other worker would come first by its name. Answers of one token stay at prefill."""
    with (
        RedisServer() as server,
        running("--model", str(save_tiny(tmp_path)), "--prefill", "2", TANDEM_REDIS_URL=server.url, **QUICK) as system,
    ):
        turn(system, "prefill-0", "decode")
        until(lambda: asyncio.run(ask(system, SHORT)) and computed(system, "prefill-1"))
        before = computed(system, "prefill-0")
        for prompt in (CONVERSATION, *OTHERS):
            assert asyncio.run(ask(system, prompt))[1] == 0
        turn(system, "prefill-0", "prefill")
        until(lambda: asyncio.run(ask(system, SHORT)) and computed(system, "prefill-0") > before)
        before = computed(system, "prefill-0")
        until(lambda: num_marks(server.url) >= NUM_MARKS)
        # A short prompt may have been loaded, too, before the gateway knew of the role.
        loads, unloaded = num_loads(system), counters(system, "prefill-1")

        answer, cached = asyncio.run(ask(system, [*CONVERSATION, *NEXT], 16))
        held = len(CONVERSATION) // BLOCK * BLOCK
        assert cached == held
        assert computed(system, "prefill-0") == before
        loaded = counters(system, "prefill-1")
        new = {name: loaded[name] - unloaded[name] for name in ("kv_host_loaded_blocks", "kv_loaded_prompts")}
        assert new == {"kv_host_loaded_blocks": held // BLOCK, "kv_loaded_prompts": 1}
        assert num_loads(system) == loads + 1
        assert len(answer) == 16
