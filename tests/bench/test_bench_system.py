"""A system started for a measurement: it ends with it, and a start that fails says why."""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from bench.system import local_system as system
from bench.system.local_system import System, is_ready, running, stop, wait_up
from process.sockets import free_port
from tandem.commands.ps import identify

IGNORES_SIGINT = "import signal, time; signal.signal(2, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


@pytest.fixture
def python() -> Iterator[Callable[[str], subprocess.Popen]]:
    """Starts Python processes, with their output in a pipe that is closed afterwards."""
    with ExitStack() as stack:
        yield lambda code: stack.enter_context(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))


def unused() -> System:
    """One at whose port nobody listens."""
    port = free_port()
    return System(f"http://127.0.0.1:{port}", port, pid=0)


def test_a_process_that_ends_is_not_waited_for(python):
    process = python("raise SystemExit(3)")
    assert wait_up(process, unused().is_up, 60) == "tandem up ended with code 3"


def test_a_process_that_never_serves_is_given_up(python):
    process = python("import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); time.sleep(600)")
    try:
        assert wait_up(process, unused().is_up, 0.3) == "not ready after 0 s"
    finally:
        stop(process)
    assert process.returncode == -signal.SIGINT


def test_a_process_that_ignores_ctrl_c_is_killed(python, monkeypatch):
    monkeypatch.setattr(system, "STOP_TIMEOUT_S", 0.3)
    process = python(IGNORES_SIGINT)
    assert process.stdout is not None and process.stdout.readline()
    stop(process)
    assert process.returncode == -signal.SIGKILL


@contextmanager
def gateway(status: int) -> Iterator[int]:
    """The port of one that answers everything with `status`."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("status", "expected"), [(200, True), (503, False)])
def test_ready_is_what_the_gateway_says(status, expected):
    with gateway(status) as port:
        assert is_ready(f"http://127.0.0.1:{port}") is expected


@pytest.mark.parametrize(("late", "expected"), [("starting", False), ("ready", True)])
def test_a_system_is_up_once_its_last_worker_is(tmp_path, monkeypatch, late, expected):
    """Ready it is before: the gateway serves by the first pair that there is."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with gateway(200) as port:
        rows = [{"role": "decode", "id": state, "url": None, "state": state} for state in ("ready", late)]
        folder = tmp_path / "tandem" / str(port)
        folder.mkdir(parents=True)
        state = {"port": port, "supervisor": identify(os.getpid()), "processes": rows}
        (folder / "state.json").write_text(json.dumps(state))
        assert System(f"http://127.0.0.1:{port}", port, os.getpid()).is_up() is expected


def test_a_system_that_does_not_start_says_its_last_words():
    with pytest.raises(RuntimeError, match=r"(?s)ended with code.*no-such-dtype"), running("--dtype", "no-such-dtype"):
        pytest.fail("it came up")
