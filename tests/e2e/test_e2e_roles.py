"""Workers that change their role under load: no request fails, no token is wrong, and the cache stays."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from bench.load.client import ask, body_of, session
from bench.system.local_system import System, get_json, running
from tests.e2e.tiny import save_tiny
from tests.waiting import until

pytestmark = pytest.mark.slow

SOON_S = 60.0
NUM_TOKENS = 24
QUICK = {"TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "64"}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A pool that balances its roles by itself where prompts wait for long, as those of one test alone do."""
    tiny = str(save_tiny(tmp_path_factory.mktemp("tiny")))
    flags = ("--model", tiny, "--dtype", "float32", "--prefill", "1", "--decode", "2", "--role-objective-s", "0.3")
    with running(*flags, **QUICK) as system:
        yield system


def turn(system: System, worker: str, role: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem", "role", worker, role, "--port", str(system.port)]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * SOON_S)


def core_of(system: System, name: str) -> dict:
    (worker,) = (worker for worker in system.workers() if worker["id"] == name)
    return get_json(f"{worker['url']}/health")["core"]


def prompts(seed: int, count: int) -> list[list[int]]:
    return [[(number * 7 + index * 13 + seed) % 256 for number in range(96 + index)] for index in range(count)]


async def answers(system: System, asked: list[list[int]]) -> list[str]:
    async with session() as http:
        bodies = [body_of(system.model(), prompt, NUM_TOKENS) for prompt in asked]
        found = await asyncio.gather(*(ask(http, system.url, body, NUM_TOKENS) for body in bodies))
    assert [one.error for one in found] == [""] * len(found)
    return [one.text for one in found]


async def test_roles_change_under_load_and_nothing_fails(system: System) -> None:
    """One decode worker turns to prefill, mixed and back, again and again, while prompts come."""
    asked = prompts(1, 6)
    expected = await answers(system, asked)

    async def load() -> int:
        rounds = 0
        while not turning.done() or not rounds:
            assert await answers(system, asked) == expected
            rounds += 1
        return rounds

    async def turns() -> None:
        for role in ("prefill", "decode", "mixed", "prefill", "mixed", "decode"):
            done = await asyncio.to_thread(turn, system, "decode-1", role)
            assert done.returncode == 0, done.stderr
            assert f"decode-1 is {role}" in done.stdout
            (row,) = (row for row in await asyncio.to_thread(system.workers) if row["id"] == "decode-1")
            assert row["role"] == role

    turning = asyncio.create_task(turns())
    rounds = await load()
    await turning
    assert rounds >= 1
    metrics = httpx.get(f"{system.url}/metrics").text
    assert "tandem_gateway_replays_total 0.0" in metrics
    await asyncio.to_thread(until, lambda: all(core_of(system, w["id"])["is_clean"] for w in system.workers()), SOON_S)


async def test_what_a_worker_cached_as_decode_it_finds_as_prefill(system: System) -> None:
    asked = prompts(100, 6)
    await answers(system, asked)
    first = core_of(system, "decode-0"), core_of(system, "decode-1")
    cached = [core["gauges"]["cached_blocks"] for core in first]
    assert turn(system, "decode-1", "prefill").returncode == 0
    assert [core_of(system, name)["gauges"]["cached_blocks"] for name in ("decode-0", "decode-1")] == cached
    try:
        prefill = next(row for row in system.workers() if row["id"] == "prefill-0")
        drained = httpx.post(f"{prefill['url']}/role", json={"role": "decode"})
        assert drained.status_code == 401
        assert turn(system, "prefill-0", "decode").returncode == 0  # then only decode-1 computes prompts
        before = core_of(system, "decode-1")["counters"]["prefix_hit_tokens"]
        await answers(system, asked)
        hits = core_of(system, "decode-1")["counters"]["prefix_hit_tokens"] - before
        assert hits > 0 and hits % 16 == 0
    finally:
        for name, role in (("prefill-0", "prefill"), ("decode-1", "decode")):
            assert turn(system, name, role).returncode == 0


async def test_where_prompts_wait_for_long_a_decode_worker_turns_by_itself(system: System) -> None:
    """Prompts of thirty clients at once, each another one, until it has; none fails."""
    errors: list[str] = []
    model, is_turned = system.model(), asyncio.Event()

    async def client(seed: int) -> None:
        rng = random.Random(seed)
        async with session() as http:
            while not is_turned.is_set():
                prompt = [rng.randrange(256) for _ in range(1900)]
                errors.append((await ask(http, system.url, body_of(model, prompt, 4), 4)).error)

    def has_turned() -> bool:
        return sorted(worker["role"] for worker in system.workers()) == ["decode", "prefill", "prefill"]

    clients = [asyncio.create_task(client(seed)) for seed in range(30)]
    try:
        await asyncio.to_thread(until, has_turned, SOON_S)
    finally:
        is_turned.set()
        await asyncio.gather(*clients)
    assert set(errors) == {""}
    changed = [worker["id"] for worker in system.workers() if worker["role"] == "prefill" and "decode" in worker["id"]]
    assert all(turn(system, name, "decode").returncode == 0 for name in changed)


def test_the_last_of_a_side_is_refused_in_words(system: System) -> None:
    refused = turn(system, "prefill-0", "decode")
    assert refused.returncode == 1 and "no worker of the pool would compute prompts" in refused.stderr
    unknown = turn(system, "decode-7", "prefill")
    assert unknown.returncode == 1 and "there are prefill-0, decode-0, decode-1" in unknown.stderr
