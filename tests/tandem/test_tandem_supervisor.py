"""The supervisor over real processes: whatever happens to it or to them, none is left."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import filterfalse
from pathlib import Path

import pytest
from rich.console import Console

from contracts.errors import ConfigError
from tandem.local.child import ChildProcess, ChildState, ProcessSpec, ready_file
from tandem.local.signals import SignalInbox
from tandem.local.supervisor import Supervisor
from tests.environment import import_path
from tests.full_disk import small_disk
from tests.waiting import is_gone, until

pytestmark = pytest.mark.slow

SUPERVISE = Path(__file__).with_name("supervise.py")
ROOT = SUPERVISE.parents[2]
DEADLINE_S = 90.0


class Run:
    """One supervisor process, and the fake services under it."""

    def __init__(self, folder: Path, services: list[dict], hangup: str = "default") -> None:
        self.folder = folder
        (folder / "pids").mkdir()
        self._output = (folder / "output").open("wb")
        command = ["env", f"--{hangup}-signal=HUP", sys.executable, str(SUPERVISE), str(folder), json.dumps(services)]
        self.process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, cwd=ROOT, env=_env())

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    @property
    def pids(self) -> list[int]:
        return [int(path.name) for path in (self.folder / "pids").iterdir()]

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        until(is_so, DEADLINE_S, lambda: f"the supervisor said: {self.output}")

    def wait_up(self) -> None:
        self.wait_until(lambda: "UP" in self.output)

    def pid_of(self, name: str) -> int:
        return json.loads((self.folder / f"{name}.json").read_text())["pid"]

    def end(self) -> int:
        return self.process.wait(DEADLINE_S)

    def nobody_left(self) -> bool:
        return all(map(is_gone, self.pids))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in filterfalse(is_gone, self.pids):
            os.kill(pid, signal.SIGKILL)
        self._output.close()


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[[list[dict]], Run]]:
    runs: list[Run] = []

    def start(services: list[dict], **more: str) -> Run:
        runs.append(Run(tmp_path, services, **more))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def service(name: str, stage: int, *options: str, **more: object) -> dict:
    return {"name": name, "stage": stage, "options": options, **more}


def _env() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": import_path(ROOT)}


def test_stages_start_in_order_and_all_end_on_ctrl_c(supervise: Callable[[list[dict]], Run]) -> None:
    run = supervise([service("late", 1, "--with-core"), service("early", 0)])
    run.wait_up()
    told = run.output.splitlines()
    assert told.index("early: starting") < told.index("late: starting")
    assert len(run.pids) == 3
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0
    run.wait_until(run.nobody_left)
    assert "asked to stop" in (run.folder / "early.log").read_text()


def test_who_begins_early_is_started_beside_that_stage_and_not_waited_for(
    supervise: Callable[[list[dict]], Run],
) -> None:
    slow = service("slow", 1, "--never-ready")
    run = supervise([service("first", 0), slow, service("early", 2, begins=1), service("late", 2)])
    run.wait_until(lambda: "early: ready" in run.output and "slow: starting" in run.output)
    assert "late: starting" not in run.output
    told = run.output.splitlines()
    assert any(line.startswith("first: ready") for line in told[: told.index("early: starting")])
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0
    run.wait_until(run.nobody_left)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("phase", [1, 2])
def test_a_signal_while_starting_ends_all(
    supervise: Callable[[list[dict]], Run], phase: int, number: signal.Signals
) -> None:
    stuck = [service("first", 0), service("second", 1, "--never-ready", "--with-core")]
    run = supervise([service("first", 0, "--never-ready"), service("second", 1)] if phase == 1 else stuck)
    run.wait_until(lambda: len(run.pids) == (1 if phase == 1 else 3))
    run.process.send_signal(number)
    assert run.end() == 0
    assert "StopRequested" in run.output
    run.wait_until(run.nobody_left)


def test_a_full_disk_ends_nothing(tmp_path: Path, supervise: Callable[..., Run]) -> None:
    """State, logs and ready files are on it, and then a service dies."""
    with small_disk(tmp_path / "disk") as disk:
        run = supervise([service("only", 0), service("vital", 0, is_vital=True)])
        run.wait_up()
        disk.fill()
        first = json.loads((disk.folder / "only.json").read_text())["pid"]
        os.kill(first, signal.SIGKILL)
        run.wait_until(lambda: len(run.pids) == 3)
        run.wait_until(lambda: "No space left" in run.output)
        assert "only is ready again" not in run.output
        disk.clear()
        run.wait_until(lambda: "only is ready again" in run.output)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 0
        assert run.output.count("No space left") == 1
        run.wait_until(run.nobody_left)


def test_a_hangup_that_nohup_ignores_ends_nothing(supervise: Callable[..., Run]) -> None:
    run = supervise([service("only", 0)], hangup="ignore")
    run.wait_up()
    run.process.send_signal(signal.SIGHUP)
    os.kill(run.pid_of("only"), signal.SIGKILL)  # what it does next is told: it has not stopped
    run.wait_until(lambda: "only is ready again" in run.output)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 0
    run.wait_until(run.nobody_left)


def test_ctrl_c_before_anything_is_ready_leaves_nothing(supervise: Callable[[list[dict]], Run]) -> None:
    run = supervise([service("only", 0)])
    run.wait_until(lambda: "starting" in run.output)
    run.process.send_signal(signal.SIGINT)
    run.end()
    run.wait_until(run.nobody_left)


def test_the_second_ctrl_c_does_not_wait_for_the_deaf(supervise: Callable[[list[dict]], Run]) -> None:
    run = supervise([service("deaf", 0, "--deaf", "--with-core", stop_timeout_s=600.0)])
    run.wait_up()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0
    run.wait_until(run.nobody_left)


def test_the_deaf_is_killed_after_its_grace(supervise: Callable[[list[dict]], Run]) -> None:
    run = supervise([service("deaf", 0, "--deaf", stop_timeout_s=0.3)])
    run.wait_up()
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 0
    run.wait_until(run.nobody_left)


def test_children_die_with_a_killed_supervisor(supervise: Callable[[list[dict]], Run]) -> None:
    run = supervise([service("deaf", 0, "--deaf"), service("other", 0)])
    run.wait_up()
    run.process.kill()
    run.wait_until(run.nobody_left)


@pytest.mark.parametrize("is_ready", [True, False])
def test_who_is_ready_when_time_is_over_is_not_late(tmp_path: Path, is_ready: bool) -> None:
    argv = ("sleep", "300")
    spec = ProcessSpec("one", "fake", 0, argv, lambda: {} if is_ready else None, os.environ, stop_timeout_s=0.0)
    child = ChildProcess(spec, tmp_path / "log", tmp_path)
    with SignalInbox() as inbox:
        supervisor = Supervisor([child], inbox, Console(quiet=True), lambda: None)
        try:
            with nullcontext() if is_ready else pytest.raises(ConfigError, match="one is not ready after"):
                supervisor.start(0.0)
        finally:
            supervisor.stop()


@pytest.mark.parametrize(("code", "words"), [(errno.ENOMEM, "TANDEM_KV_CACHE_MIB"), (errno.EAGAIN, "ulimit -u")])
def test_a_machine_without_room_for_a_process_is_told_in_a_line(tmp_path, monkeypatch, code, words) -> None:
    """The system goes on, and the process comes back when there is room again."""
    child = ChildProcess(ProcessSpec("one", "fake", 0, ("sleep", "300"), dict, os.environ), tmp_path / "log", tmp_path)
    fork, num_failing, said = ChildProcess._fork, [3], io.StringIO()

    def fails_thrice(self: ChildProcess) -> subprocess.Popen:
        if num_failing[0] == 0:
            return fork(self)
        num_failing[0] -= 1
        raise OSError(code, os.strerror(code))

    with SignalInbox() as inbox:
        supervisor = Supervisor([child], inbox, Console(file=said, width=400), lambda: None)
        try:
            monkeypatch.setattr(ChildProcess, "_fork", fails_thrice)
            with pytest.raises(ConfigError, match=words):
                supervisor.start(60.0)
            while not child.is_running:
                monkeypatch.setattr(ChildProcess, "pause_s", 0.0)
                supervisor._start_again()
        finally:
            supervisor.stop()
    told = said.getvalue().splitlines()
    assert len(told) == 2 and all(line.startswith("one can't be started: ") and words in line for line in told)


def test_a_complaint_while_starting_is_one_line(supervise: Callable[[list[dict]], Run]) -> None:
    run = supervise([service("first", 0), service("wrong", 1, "--complain", "tandem worker: no such model: /nowhere")])
    assert run.end() == 1
    assert run.output.splitlines()[-1] == "ConfigError: wrong could not start: no such model: /nowhere"
    run.wait_until(run.nobody_left)


def test_a_complaint_of_several_lines_is_joined(supervise: Callable[[list[dict]], Run]) -> None:
    run = supervise([service("wrong", 0, "--complain", "tandem worker: 1 wrong setting\n  dtype\n    not known")])
    assert run.end() == 1
    assert run.output.splitlines()[-1] == "ConfigError: wrong could not start: 1 wrong setting dtype not known"


def test_a_complaint_that_points_to_its_log_says_where_that_is(supervise: Callable[[list[dict]], Run]) -> None:
    said = "tandem worker: the engine core was killed by SIGSEGV while starting; see the log above"
    run = supervise([service("wrong", 0, "--complain", said)])
    assert run.end() == 1
    assert run.output.splitlines()[-1].endswith(f"SIGSEGV while starting; see {run.folder / 'wrong.log'}")


def test_any_other_death_while_starting_shows_the_end_of_the_log(supervise: Callable[[list[dict]], Run]) -> None:
    run = supervise([service("wrong", 0, "--complain", "Segmentation fault")])
    assert run.end() == 1
    assert "wrong ended with code 1 while starting; the end of" in run.output
    assert "    Segmentation fault" in run.output


def test_a_ready_file_that_goes_as_it_is_looked_for_says_that_nobody_is_ready(tmp_path: Path, monkeypatch) -> None:
    """A process takes its own away as it ends."""
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert ready_file(tmp_path / "gone")() is None


def test_a_death_is_told_and_the_rest_goes_on(supervise: Callable[[list[dict]], Run]) -> None:
    run = supervise([service("vital", 0, is_vital=True), service("worker", 1, "--with-core")])
    run.wait_up()
    core_pid = json.loads((run.folder / "worker.json").read_text())["core_pid"]
    os.kill(run.pid_of("worker"), signal.SIGKILL)
    words = "worker was killed by SIGKILL (the kernel does that when memory runs out); the end of"
    run.wait_until(lambda: words in run.output)
    run.wait_until(lambda: is_gone(core_pid))
    run.wait_until(lambda: "the service is starting" in run.output)
    assert run.process.poll() is None
    assert not is_gone(run.pid_of("vital"))


def test_who_dies_is_started_again(supervise: Callable[[list[dict]], Run]) -> None:
    run = supervise([service("vital", 0, is_vital=True), service("worker", 1, "--with-core")])
    run.wait_up()
    first = run.pid_of("worker")
    os.kill(first, signal.SIGKILL)  # it can't take its ready file back
    run.wait_until(lambda: "worker is ready again after" in run.output)
    assert "worker starts again\n" in run.output
    second = run.pid_of("worker")
    assert second != first and not is_gone(second)
    os.kill(second, signal.SIGKILL)
    run.wait_until(lambda: "worker starts again in 2 s" in run.output)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0
    run.wait_until(run.nobody_left)


def test_who_dies_young_again_and_again_is_waited_for_longer(tmp_path: Path) -> None:
    spec = ProcessSpec(name="bad", role="fake", stage=0, argv=(sys.executable, "-c", "0"), is_ready=lambda: None)
    child = ChildProcess(spec, tmp_path / "bad.log", tmp_path)
    pauses = []
    for _ in range(7):
        _live(child)
        pauses.append(child.pause_s)
    assert pauses == [0.0, 2.0, 5.0, 15.0, 30.0, 30.0, 30.0]
    assert child.state is ChildState.DEAD and not child.is_due


def test_a_long_life_makes_earlier_deaths_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ProcessSpec(name="bad", role="fake", stage=0, argv=("sleep", "0.2"), is_ready=dict)
    child = ChildProcess(spec, tmp_path / "bad.log", tmp_path)
    for _ in range(3):
        _live(child)
    assert child.pause_s == 5.0
    monkeypatch.setattr("tandem.local.child.LONG_LIFE_S", 0.0)
    _live(child)
    assert child.pause_s == 0.0 and child.is_due


def _live(child: ChildProcess) -> None:
    """From a start to the death."""
    child.start()

    def is_dead() -> bool:
        child.refresh()
        return child.state is ChildState.DEAD

    until(is_dead, DEADLINE_S)


def test_a_vital_death_ends_all_with_code_3(supervise: Callable[[list[dict]], Run]) -> None:
    run = supervise([service("vital", 0, is_vital=True), service("worker", 1)])
    run.wait_up()
    os.kill(run.pid_of("vital"), signal.SIGTERM)
    assert run.end() == 3
    assert "VitalDeath: vital is gone" in run.output
    run.wait_until(run.nobody_left)
