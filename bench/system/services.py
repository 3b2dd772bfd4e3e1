"""The services of one system, started one by one, so that each can be frozen, killed and replaced."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from bench.system.local_system import is_ready, stop
from bench.system.network import Network
from coordinator.store.local_server import RedisServer
from process.sockets import free_port

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.05


class Services:
    """A coordinator, the `workers` (flags by name) and a gateway on a Redis of their own.

    The context manager starts only Redis; `start` starts a service. Logs and ready files lie in `folder`. With a
    `network`, which has been entered, a worker whose name it has runs on that host, and all others on the router.
    """

    def __init__(
        self, folder: Path, workers: Mapping[str, tuple[str, ...]], network: Network | None = None, /, **settings: str
    ) -> None:
        self.workers, self.network = dict(workers), network
        self.redis = RedisServer(host=network.router if network else "127.0.0.1")
        self._folder, self._settings = folder, settings
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._port = free_port()

    def __enter__(self) -> Self:
        self.redis.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                stop(process)
        self.redis.close()

    @property
    def names(self) -> list[str]:
        return ["coordinator", *self.workers, "gateway"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self, name: str) -> None:
        """Start a service under its name and return at once; `ready` waits for it."""
        self._ready_file(name).unlink(missing_ok=True)
        command = [sys.executable, "-m", *self._command(name), "--ready-file", str(self._ready_file(name))]
        if self.network and name in self.network.hosts:
            command = [*self.network.command(name), *command, "--host", self.network.address(name)]
        mine = {"TANDEM_REDIS_URL": self.redis.url, "TANDEM_SECRET": "s"} | self._settings
        with self.log(name).open("ab") as output:
            self._processes[name] = subprocess.Popen(
                command, env=os.environ | mine, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    async def ready(self, name: str) -> None:
        """Wait until the service is ready.

        Raise RuntimeError with its last output if it ends, TimeoutError if it takes too long.
        """
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._ready_file(name).exists():
                if not self.is_alive(name):
                    raise RuntimeError(f"{name} ended: {self.log(name).read_text()[-1000:]}")
                await asyncio.sleep(POLL_S)

    async def start_all(self, timeout_s: float) -> None:
        """Start every service, and wait until requests can be placed.

        That is when all are ready, and at most `timeout_s` later. Raises RuntimeError and TimeoutError as `ready` does.
        """
        for name in self.names:
            self.start(name)
        for name in self.names:
            await self.ready(name)
        async with asyncio.timeout(timeout_s):
            while not is_ready(self.url):
                await asyncio.sleep(0.1)

    def is_alive(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def facts(self, name: str) -> dict:
        """Return what it wrote when it was ready: `url`, `pid`, and for a worker `core_pid`."""
        return json.loads(self._ready_file(name).read_text())

    def signal(self, name: str, number: signal.Signals, to_core: bool = False) -> None:
        """Send a signal to the service, or to a worker's engine core; one that is gone is passed over."""
        if self.is_alive(name):
            with suppress(ProcessLookupError, FileNotFoundError):
                os.kill(self.facts(name)["core_pid"] if to_core else self._processes[name].pid, number)

    async def ended(self, name: str) -> None:
        """Wait until the service has ended; raise TimeoutError if it does not."""
        async with asyncio.timeout(STOP_TIMEOUT_S):
            while self.is_alive(name):
                await asyncio.sleep(POLL_S)

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _ready_file(self, name: str) -> Path:
        return self._folder / f"{name}.ready"

    def _command(self, name: str) -> list[str]:
        if name == "gateway":
            return ["gateway", "--port", str(self._port)]
        if name == "coordinator":
            return ["coordinator", "--port", "0"]
        flags = self.workers[name]
        port = () if "--port" in flags else ("--port", "0")
        return ["tandem", "worker", "--worker-id", name, *flags, *port]
