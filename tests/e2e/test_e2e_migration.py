"""Workers that drain give their running answers to others: clients see the answers that nobody moved."""

import asyncio
import os
import re
import signal
from typing import Any

import httpx
import pytest

from bench.system.local_system import System, get_json, running
from tests.e2e.tiny import save_tiny
from tests.waiting import is_gone, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SOON_S = 60.0
SETTINGS = {"TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "64"}
NUM_TOKENS = 700
UNENDING = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
ASKED: list[dict[str, Any]] = [
    {"prompt": [8] * 40, "temperature": 0, "logprobs": 2, **UNENDING},
    {"prompt": [9] * 100, "temperature": 1.0, "seed": 3, "n": 2, **UNENDING},
    {"prompt": [10] * 7, "temperature": 0.8, "seed": 4, "frequency_penalty": 0.5, "logprobs": 0, **UNENDING},
    {"prompt": [11] * 64, "temperature": 0.9, "seed": 5, "stop": ["no such text"], **UNENDING},
    {"prompt": [12] * 30, "temperature": 1.0, "seed": 6, "structured_outputs": {"regex": "[a-z ]{600}"}, **UNENDING},
]


async def answers(system: System, model: str) -> list[list[dict]]:
    """Return the choices of all that is asked, at once."""
    async with httpx.AsyncClient(base_url=system.url, timeout=120) as http:
        replies = await asyncio.gather(*(http.post("/v1/completions", json={"model": model, **body}) for body in ASKED))
    assert [reply.text for reply in replies if reply.status_code != 200] == []
    return [reply.json()["choices"] for reply in replies]


def metric(system: System, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{system.url}/metrics").text, re.M)
    return float(found[1]) if found else 0.0


def num_requests(worker: dict) -> int:
    return int(get_json(f"{worker['url']}/health")["core"]["gauges"]["requests"])


def same(found: list[list[dict]], expected: list[list[dict]]) -> bool:
    for choices, others in zip(found, expected, strict=True):
        for choice, other in zip(choices, others, strict=True):
            assert (choice["text"], choice["finish_reason"]) == (other["text"], other["finish_reason"])
            told, meant = choice["logprobs"] or {}, other["logprobs"] or {}
            assert told.get("tokens") == meant.get("tokens")
            assert told.get("token_logprobs", []) == pytest.approx(meant.get("token_logprobs", []), abs=1e-3)
    return True


def test_answers_of_a_worker_that_drains_go_on_elsewhere_as_if_it_had_not(tmp_path):
    """In float32. The worker is drained by the signal that a supervisor sends, and ends without them."""

    async def drained(system: System, model: str) -> tuple[list[list[dict]], dict]:
        workers = [worker for worker in system.workers() if worker["role"] == "decode"]
        asked = asyncio.create_task(answers(system, model))
        worker = await asyncio.to_thread(answering, workers)
        os.kill(worker["pid"], signal.SIGTERM)
        return await asked, worker

    with running("--model", str(save_tiny(tmp_path)), "--dtype", "float32", "--decode", "2", **SETTINGS) as system:
        model = system.model()
        expected = asyncio.run(answers(system, model))
        found, worker = asyncio.run(drained(system, model))
        assert same(found, expected)
        assert metric(system, "tandem_gateway_replays_total") == 0
        assert metric(system, 'tandem_gateway_migrations_total{outcome="committed",reason="drain"}') >= 2
        until(lambda: is_gone(worker["pid"]), SOON_S)
        until(lambda: all(get_json(f"{w['url']}/health")["core"]["is_clean"] for w in others(system, worker)), SOON_S)


def answering(workers: list[dict]) -> dict:
    """Return the worker with the most answers, once it has some."""
    until(lambda: any(num_requests(worker) > 1 for worker in workers), SOON_S, period_s=0.01)
    return max(workers, key=num_requests)


def others(system: System, worker: dict) -> list[dict]:
    return [each for each in system.workers() if each["id"] != worker["id"]]
