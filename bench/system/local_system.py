"""A whole system for one measurement: `tandem up` on a free port, stopped afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile

from process.local_http import open_local
from process.sockets import free_port

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class System:
    """A running system: `url` is the gateway's, `nodes()` are the rows of `tandem ps --json`."""

    url: str
    port: int
    pid: int

    def nodes(self) -> list[dict]:
        command = [sys.executable, "-m", "tandem", "ps", "--json", "--port", str(self.port)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout)

    def workers(self) -> list[dict]:
        return [node for node in self.nodes() if node["role"] in ("prefill", "decode", "mixed")]

    def is_up(self) -> bool:
        """Return whether all services are ready.

        The gateway is ready as soon as one pair is, however many workers were asked for.
        """
        return is_ready(self.url) and all(node["state"] == "ready" for node in self.nodes())

    def model(self) -> str:
        return model_of(self.url)


@contextmanager
def running(*flags: str, **environment: str) -> Iterator[System]:
    """Start `tandem up FLAGS`, yield once all of it is up, and stop it afterwards.

    `environment` adds settings of the services to the environment of this process. RuntimeError with the last output is
    raised if the system does not come up.
    """
    port = free_port()
    command = [sys.executable, "-m", "tandem", "up", "--port", str(port), *flags]
    with TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment)
        try:
            system = System(f"http://127.0.0.1:{port}", port, process.pid)
            if reason := wait_up(process, system.is_up, START_TIMEOUT_S):
                output.seek(0)
                raise RuntimeError(f"{reason}:\n{output.read()}")
            yield system
        finally:
            stop(process)


def wait_up(process: subprocess.Popen, is_up: Callable[[], bool], timeout_s: float) -> str:
    """Return an empty text once the system is up, or else why it will not be."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return f"tandem up ended with code {process.returncode}"
        if is_up():
            return ""
        time.sleep(0.2)
    return f"not ready after {timeout_s:.0f} s"


def is_ready(url: str) -> bool:
    try:
        with open_local(f"{url}/ready", timeout_s=2) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def model_of(url: str) -> str:
    return get_json(f"{url}/v1/models")["data"][0]["id"]


def stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def get_json(url: str) -> dict:
    with open_local(url, timeout_s=10) as response:
        return json.load(response)
