"""Services started one by one, as on several machines, with settings that need not fit."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from bench.system import get_json, stop
from coordinator.redis_server import RedisServer
from tests.e2e.tiny import save_tiny

DEADLINE_S = 90.0


class Services:
    """What is started here knows one another, and ends with the test."""

    def __init__(self, folder: Path, redis_url: str, running: ExitStack) -> None:
        self._folder, self._running = folder, running
        self._settings = {
            "TANDEM_MODEL": str(save_tiny(folder)),
            "TANDEM_REDIS_URL": redis_url,
            "TANDEM_SECRET": "s",
            "TANDEM_NUM_THREADS": "1",
            "TANDEM_KV_CACHE_MIB": "16",
        }

    def worker(self, name: str, role: str, transfer: str) -> str:
        flags = ("--worker-id", name, "--role", role, "--transfer", transfer, "--dtype", "float32")
        return self._start(name, "tandem", "worker", *flags)

    def gateway(self) -> str:
        return self._start("gateway", "gateway")

    def _start(self, name: str, module: str, *flags: str) -> str:
        """Its URL."""
        ready, log = self._folder / f"{name}.ready", self._folder / f"{name}.log"
        command = [sys.executable, "-m", module, *flags, "--port", "0", "--ready-file", str(ready)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=os.environ | self._settings, stdout=output, stderr=subprocess.STDOUT
            )
        self._running.callback(stop, process)
        until(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        return json.loads(ready.read_text())["url"]


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with RedisServer() as redis, ExitStack() as running:
        yield Services(tmp_path, redis.url, running)


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def test_workers_whose_transfers_do_not_meet_are_no_pair_and_those_that_do_serve(services: Services) -> None:
    lonely, decode = services.worker("p0", "prefill", "shm"), services.worker("d0", "decode", "tcp")
    url = services.gateway()

    def ask() -> httpx.Response:
        return httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 3}, timeout=DEADLINE_S)

    until(lambda: "transfer is" in httpx.get(f"{url}/ready").text)
    ready, refused = httpx.get(f"{url}/ready"), ask()
    assert (ready.status_code, refused.status_code) == (503, 503)
    assert "d0: it can't take the KV of p0: transfer is tcp here, shm there: leave --transfer at auto" in ready.text
    assert "no decode worker can take the KV of a prefill worker" in refused.text

    prefill = services.worker("p1", "prefill", "auto")
    until(lambda: httpx.get(f"{url}/ready").status_code == 200)
    assert [ask().status_code for _ in range(5)] == [200] * 5

    def transports(worker: str) -> list[str]:
        return [link["transport"] for link in get_json(f"{worker}/health")["core"]["links"]]

    until(lambda: transports(prefill) == transports(decode) == ["tcp"])  # told a moment later
    assert transports(lonely) == []
