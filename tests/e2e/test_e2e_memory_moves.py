"""Answers that outgrow the KV of their worker go to one that has room, before any is preempted and computed again.

The worker's steps are counted out, so that it is short of KV for as long as the others take to see that.
"""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.system.local_system import get_json, model_of
from bench.system.services import Services
from tests.e2e.stepped_core import STEPS_FILE
from tests.e2e.tiny import save_tiny
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = {"TANDEM_DTYPE": "float32", "TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "2"}
"""Room for the KV of 4096 tokens."""
WORKERS = {"p": ("--role", "prefill"), "full": ("--role", "decode"), "empty": ("--role", "decode")}
NUM_PROMPT, NUM_TOKENS = 1500, 540
TIMEOUT_S = 280.0
ASKED: list[dict[str, Any]] = [
    {"prompt": [8 + seed] * NUM_PROMPT, "temperature": 1.0, "seed": seed, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    for seed in range(2)
]
STEPS_TO_SHORT = 340
"""After so many the two answers leave less than an eighth of the KV free; 200 more fit."""
TAKEN = "kv_handoffs_received_committed"
MOVED = 'tandem_gateway_migrations_total{outcome="committed",reason="memory"}'
SEEN = 'tandem_gateway_worker_running{role="decode",worker="empty"}'


class SteppedServices(Services):
    """Services of which the worker `full` takes as many steps as it is let."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self._steps, self._num_let = folder / "steps", 0
        super().__init__(folder, WORKERS, **settings, **{STEPS_FILE: str(self._steps)})

    def let(self, count: int) -> None:
        """Let it take so many steps more, beyond which it takes none."""
        self._num_let += count
        (self._steps.parent / "letting").write_text(str(self._num_let), "utf-8")
        (self._steps.parent / "letting").rename(self._steps)

    def let_all(self) -> None:
        self._steps.unlink()

    def _command(self, name: str) -> list[str]:
        command = super()._command(name)
        return ["tests.e2e.stepped_worker", *command[2:]] if name == "full" else command


async def start(services: Services, *names: str) -> None:
    for name in names:
        services.start(name)
    for name in names:
        await services.ready(name)


async def answers(url: str, bodies: list[dict[str, Any]]) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        model = await asyncio.to_thread(model_of, url)
        asked = (http.post("/v1/completions", json={"model": model, **body}) for body in bodies)
        replies = await asyncio.gather(*asked)
    assert [reply.text for reply in replies if reply.status_code != 200] == []
    return [reply.json()["choices"][0]["text"] for reply in replies]


def core(services: Services, name: str) -> dict[str, dict[str, float]]:
    return get_json(f"{services.facts(name)['url']}/health")["core"]


def gateway_metrics(services: Services) -> dict[str, float]:
    lines = httpx.get(f"{services.url}/metrics", timeout=TIMEOUT_S).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def has_moved(services: SteppedServices) -> bool:
    """Return whether an answer has moved; if not, let all go on by a token, as a migration wants some."""
    if gateway_metrics(services).get(MOVED, 0.0) == 0:
        services.let(1)
        return False
    return True


def wait_for_the_move(services: SteppedServices) -> None:
    services.let(STEPS_TO_SHORT)
    until(lambda: core(services, "full")["counters"]["migrations_begun"] > 0)
    until(lambda: has_moved(services), period_s=0.5)  # 200 steps are left: more than it waits
    services.let_all()


async def test_an_answer_moves_before_its_worker_has_no_memory_for_it(tmp_path: Path) -> None:
    with SteppedServices(tmp_path, TANDEM_MODEL=str(save_tiny(tmp_path)), **SETTINGS) as services:
        await start(services, "coordinator", "p", "full", "gateway")
        await asyncio.to_thread(until, lambda: httpx.get(f"{services.url}/ready", timeout=TIMEOUT_S).status_code == 200)
        expected = [(await answers(services.url, [body]))[0] for body in ASKED]
        services.let(0)
        asked = asyncio.create_task(answers(services.url, ASKED))
        await asyncio.to_thread(until, lambda: core(services, "full")["counters"][TAKEN] == 2 * len(ASKED))
        await start(services, "empty")
        await asyncio.to_thread(until, lambda: SEEN in gateway_metrics(services))
        await asyncio.to_thread(wait_for_the_move, services)
        assert await asked == expected
        await asyncio.to_thread(until, lambda: core(services, "empty")["counters"][TAKEN] == 1)
        assert core(services, "full")["counters"]["preemptions"] == 0
