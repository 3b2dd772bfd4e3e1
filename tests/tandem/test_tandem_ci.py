"""`.ci/run` with stand-ins for the programs it calls: what it leaves behind and what it says, however it ends."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.waiting import until

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
DEADLINE_S = 60.0
SECTIONS = ("install", "check", "test", "docs", "images", "test-compose")
PROGRAM = """#!/usr/bin/env bash
echo "{name} $* ${{COMPOSE_TEST_PROJECT:-}}" >>"{calls}"
{body}
"""


class Checkout:
    """A folder with the script, and a PATH whose python3, make and docker only write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls_file = folder, folder / "calls"
        (folder / ".ci").mkdir()
        (folder / "bin").mkdir()
        shutil.copy(SCRIPT, folder / ".ci" / "run")
        for name in ("python3", "make", "docker", "redis-server", "prometheus"):
            self.program(name, "")

    def program(self, name: str, body: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(PROGRAM.format(name=name, calls=self.calls_file, body=body))
        path.chmod(0o700)

    def start(self) -> subprocess.Popen[str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        command = [str(self.folder / ".ci" / "run")]
        # A script can't trap what was ignored when it began, as SIGINT is in a shell's background jobs.
        heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        environment = os.environ | {"PATH": path}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=heard)

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def wait_for(self, is_there: Callable[[str], bool]) -> None:
        until(lambda: any(map(is_there, self.calls)), DEADLINE_S, lambda: self.calls)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def summary(said: str) -> dict[str, str]:
    """Section -> how it went."""
    rows = [line.split() for line in said.rpartition("===== summary\n")[2].splitlines()]
    return {row[0]: row[1] for row in rows}


def was_taken_down(checkout: Checkout) -> bool:
    """Under the name that the tests were given."""
    (tests,) = {call.split()[-1] for call in checkout.calls if call.startswith("make test-compose")}
    return any(call.startswith(f"docker compose --project-name {tests} down") for call in checkout.calls)


def test_everything_passes_and_the_project_is_down(checkout: Checkout) -> None:
    process = checkout.start()
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert summary(said) == dict.fromkeys(SECTIONS, "passed")
    assert was_taken_down(checkout)


def test_one_failure_fails_all_and_the_rest_still_runs(checkout: Checkout) -> None:
    checkout.program("make", "[[ $1 != check ]]")
    process = checkout.start()
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert summary(said) == dict.fromkeys(SECTIONS, "passed") | {"check": "FAILED"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_cancel_ends_the_section_takes_the_project_down_and_says_so(
    checkout: Checkout, number: signal.Signals, code: int
) -> None:
    pid_file = checkout.folder / "pid"
    checkout.program("make", f"[[ $1 != test-compose ]] || {{ echo $$ >{pid_file}; sleep 300; }}")
    process = checkout.start()
    checkout.wait_for(lambda call: call.startswith("make test-compose"))
    process.send_signal(number)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code
    assert summary(said) == dict.fromkeys(SECTIONS, "passed") | {"test-compose": "CANCELLED"}
    assert was_taken_down(checkout)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_without_docker_it_fails_and_says_why(checkout: Checkout) -> None:
    checkout.program("docker", "exit 1")
    process = checkout.start()
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "no Docker engine answers here" in said
    assert not any("compose" in call for call in checkout.calls)
