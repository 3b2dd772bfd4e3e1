"""The gateway's preStop hook, run as in its container, against the metrics that a gateway writes."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from gateway.dispatch.dispatcher import Dispatcher
from gateway.observability.metrics import Metrics
from tests.docs.fences import ROOT
from tests.gateway.gateway_rig import GATEWAY, ListStore

IDLE = Metrics(Dispatcher(ListStore([]), GATEWAY, "s", "m"), "m", "0").text()  # pyright: ignore[reportArgumentType]


@pytest.fixture
def asked() -> Iterator[tuple[HTTPServer, list[bytes]]]:
    """Yield a server of metrics, and what it answers from now on; the last of it again and again."""
    answers: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers.pop(0) if len(answers) > 1 else answers[0])

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        yield server, answers
        server.shutdown()
        thread.join()


def wait(server: HTTPServer, timeout_s: float) -> subprocess.CompletedProcess[str]:
    url = f"http://127.0.0.1:{server.server_address[1]}/metrics"
    program = str(ROOT / "docker" / "wait_idle.py")
    command = [sys.executable, "-IS", program, url, "--settle-s=0", f"--timeout-s={timeout_s}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def busy() -> bytes:
    text = IDLE.replace(b"\ntandem_gateway_inflight 0.0", b"\ntandem_gateway_inflight 2.0")
    assert text != IDLE
    return text


def test_it_ends_when_nothing_is_in_progress(asked: tuple[HTTPServer, list[bytes]]) -> None:
    server, answers = asked
    answers += [busy(), IDLE]
    assert wait(server, timeout_s=20).returncode == 0
    assert answers == [IDLE]


def test_it_ends_when_the_time_is_over(asked: tuple[HTTPServer, list[bytes]]) -> None:
    server, answers = asked
    answers.append(busy())
    assert wait(server, timeout_s=0.2).returncode == 0


def test_it_says_what_it_does_not_understand(asked: tuple[HTTPServer, list[bytes]]) -> None:
    server, answers = asked
    answers.append(b"# nothing\n")
    done = wait(server, timeout_s=20)
    assert done.returncode != 0 and "has no tandem_gateway_inflight" in done.stderr
