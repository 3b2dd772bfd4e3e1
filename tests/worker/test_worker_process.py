"""A real worker: front and core as processes, alone in a pool of a real Redis."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from bench.system.local_system import get_json
from contracts.codec import frame
from tests.e2e.tiny import save_tiny
from tests.environment import import_path, plain_environment
from tests.waiting import is_gone, until
from tests.worker.worker_rig import DEADLINE_S, registry, running_worker
from worker.messages import Start, Stop

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


def start(*flags: str, secret: str = "s") -> subprocess.Popen:
    command = [sys.executable, "-m", "tandem", "worker", *registry(), *flags]
    env = plain_environment() | {"TANDEM_SECRET": secret, "TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "16"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def refused(*flags: str, secret: str = "s") -> str:
    """The one line that a worker leaves which could not start."""
    _, words = start(*flags, secret=secret).communicate(timeout=DEADLINE_S)
    lines = [line for line in words.splitlines() if not line.startswith("20")]
    assert len(lines) == 1, words
    return lines[0]


@pytest.fixture
def worker(model, tmp_path):
    """A mixed worker that serves."""
    with running_worker(tmp_path, model) as found:
        yield found


def test_it_says_who_it_is_and_is_healthy(worker):
    assert worker.facts["pid"] == worker.process.pid and worker.facts["role"] == "mixed"
    until(worker.core)
    health = get_json(f"{worker.url}/health")
    assert health["status"] == "ok" and health["core"]["is_clean"]
    assert health["core_pid"] == worker.core_pid
    assert worker.status_of("/ready") == (200, "ready")
    until(lambda: worker.core()["num_turns"] > health["core"]["num_turns"])  # idle as it is


def test_a_signal_ends_front_and_core(worker, tmp_path):
    worker.process.send_signal(signal.SIGINT)
    assert worker.process.wait(DEADLINE_S) == 0
    until(lambda: is_gone(worker.core_pid))
    assert not (tmp_path / "ready.json").exists()


def test_a_signal_to_the_whole_group_is_the_fronts_to_answer(worker, tmp_path):
    """systemd sends it so.

    A core that ended by itself would count as a death, and end what runs.
    """
    os.kill(worker.core_pid, signal.SIGTERM)
    time.sleep(0.2)
    assert not is_gone(worker.core_pid)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(DEADLINE_S) == 0
    until(lambda: is_gone(worker.core_pid))
    assert not (tmp_path / "ready.json").exists()


def test_a_dead_core_ends_the_worker_with_its_own_code(worker):
    os.kill(worker.core_pid, signal.SIGKILL)
    assert worker.process.wait(DEADLINE_S) == 3


def test_a_core_that_is_told_to_stop_before_it_has_read_its_start_loads_no_model():
    """It would be ended by a signal only, five seconds later."""
    front, theirs = socket.socketpair()
    with front, theirs:
        front.sendall(frame(Start(b"{}", "w", "1")) + frame(Stop()))
        command = [sys.executable, "-m", "mixed_svc.core", str(theirs.fileno())]
        core = subprocess.run(command, pass_fds=[theirs.fileno()], timeout=DEADLINE_S)
        theirs.close()
        assert core.returncode == 0
        assert front.recv(1) == b""


def test_a_killed_front_takes_its_core_along(worker):
    worker.process.kill()
    worker.process.wait()
    until(lambda: is_gone(worker.core_pid))


def test_a_model_that_is_not_there_is_one_line(tmp_path):
    assert str(tmp_path / "nothing.gguf") in refused("--model", str(tmp_path / "nothing.gguf"))


def test_a_core_that_fails_ends_the_worker_though_its_own_end_takes_for_ever(model, tmp_path, monkeypatch):
    """Giving back a GPU's memory may wait for another GPU for ever."""
    (tmp_path / "sitecustomize.py").write_text(_FAILS)
    monkeypatch.setenv("PYTHONPATH", import_path(tmp_path, os.getcwd()))
    _, words = start("--model", model).communicate(timeout=DEADLINE_S)
    assert "RuntimeError: no memory is left" in words
    assert "ended with code 1" in words


_FAILS = """
import sys
if "mixed_svc.core" in sys.orig_argv:
    import atexit, threading
    import engine.loader
    def fail(*_):
        raise RuntimeError("no memory is left")
    engine.loader.load_engine = fail
    atexit.register(threading.Event().wait)
"""


def test_no_secret_is_one_line(model):
    assert "TANDEM_SECRET" in refused("--model", model, secret="")


def test_a_transport_that_is_none_is_one_line(model):
    assert "transfer is 'pigeon'" in refused("--model", model, "--transfer", "pigeon")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--redis-url", "redis://127.0.0.1:1/0"), "(redis_url, set by --redis-url or TANDEM_REDIS_URL)"),
        (("--redis-url", "127.0.0.1:6379"), "redis_url is '127.0.0.1:6379'; it must begin with redis://"),
        (("--redis-url", "redis://127.0.0.1:1/0", "--pool", "{a}"), "pool is '{a}'"),
    ],
)
def test_a_registry_that_is_not_to_be_had_is_said_before_the_model_is_loaded(tmp_path, flags, words):
    assert words in refused("--model", str(tmp_path / "nothing.gguf"), *flags)
