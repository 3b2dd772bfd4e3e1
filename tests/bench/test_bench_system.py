"""A system started for a measurement: it ends with it, and a start that fails says why."""

import http.server
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from bench import system
from bench.system import free_port, is_ready, running, stop, wait_ready

IGNORES_SIGINT = "import signal, time; signal.signal(2, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


@pytest.fixture
def python() -> Iterator[Callable[[str], subprocess.Popen]]:
    """Starts Python processes, with their output in a pipe that is closed afterwards."""
    with ExitStack() as stack:
        yield lambda code: stack.enter_context(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))


def test_a_free_port_is_free():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", free_port()))


def test_a_process_that_ends_is_not_waited_for(python):
    process = python("raise SystemExit(3)")
    assert wait_ready(process, f"http://127.0.0.1:{free_port()}", 60) == "tandem up ended with code 3"


def test_a_process_that_never_serves_is_given_up(python):
    process = python("import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); time.sleep(600)")
    try:
        assert wait_ready(process, f"http://127.0.0.1:{free_port()}", 0.3) == "not ready after 0 s"
    finally:
        stop(process)
    assert process.returncode == -signal.SIGINT


def test_a_process_that_ignores_ctrl_c_is_killed(python, monkeypatch):
    monkeypatch.setattr(system, "STOP_TIMEOUT_S", 0.3)
    process = python(IGNORES_SIGINT)
    assert process.stdout is not None and process.stdout.readline()
    stop(process)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("status", "expected"), [(200, True), (503, False)])
def test_ready_is_what_the_gateway_says(status, expected):
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert is_ready(f"http://127.0.0.1:{server.server_port}") is expected
        finally:
            server.shutdown()
            thread.join()


def test_a_system_that_does_not_start_says_its_last_words():
    with pytest.raises(RuntimeError, match=r"(?s)ended with code.*no-such-dtype"), running("--dtype", "no-such-dtype"):
        pytest.fail("it came up")
