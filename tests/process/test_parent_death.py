"""A leashed process: it is the program that was asked for, and it dies with its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from process.parent_death import die_with_parent
from tests.waiting import is_gone, until

ROOT = Path(__file__).parents[2]
PARENT = """
import subprocess, sys, time
from process.parent_death import die_with_parent
child = subprocess.Popen(die_with_parent(["sleep", "300"]))
print(child.pid, flush=True)
time.sleep(300)
"""
DEADLINE_S = 90.0


def test_the_pid_is_the_programs_own():
    code = "import os; print(os.getpid())"
    with subprocess.Popen(die_with_parent([sys.executable, "-c", code]), stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=DEADLINE_S)
    assert int(said) == process.pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent(number: signal.Signals):
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.send_signal(number)
    until(lambda: is_gone(pid), DEADLINE_S)


def test_whoever_comes_too_late_for_its_parent_does_not_start():
    command = [*die_with_parent([])[:3], str(os.getppid()), "sleep", "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (1, "the parent is gone\n")


@pytest.mark.parametrize("program", ["/nowhere/at/all", "/etc/passwd"])
def test_a_program_that_cannot_be_run_is_one_line(program: str):
    done = subprocess.run(die_with_parent([program]), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{program} can't be run: ") and done.stderr.count("\n") == 1
