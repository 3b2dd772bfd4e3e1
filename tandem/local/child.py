"""One process of a system: its specification, and its control while it runs."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from process.parent_death import die_with_parent
from process.supervision import describe_exit

TAIL_NBYTES = 8192
LONG_LIFE_S = 60.0
PAUSES_S = (0.0, 0.0, 2.0, 5.0, 15.0, 30.0)
"""The seconds before a process is started again, by the number of its short lives in a row; the last holds for all
further ones.
"""


@dataclass(frozen=True)
class ProcessSpec:
    """The specification of a process.

    `stage`: processes are started in ascending order, each stage once the one before is ready, and ended in descending
    order. `begins`: an earlier stage with which it is started already, though nothing waits for it before its own.
    `is_vital`: the system can't do without it. `is_ready`: called often; returns None while the process is not ready,
    then facts (pid, core_pid, url) about it.
    """

    name: str
    role: str
    stage: int
    argv: tuple[str, ...]
    is_ready: Callable[[], dict | None]
    env: Mapping[str, str] = field(default_factory=dict)
    is_vital: bool = False
    stop_timeout_s: float = 5.0
    begins: int | None = None

    @property
    def first_stage(self) -> int:
        return self.stage if self.begins is None else self.begins


class ChildState(StrEnum):
    """The state of a child."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class CannotFork(Exception):
    """The machine has no memory or no room for another process."""


class ChildProcess:
    """A process in its own session, with all output in one log file. Not thread-safe."""

    def __init__(self, spec: ProcessSpec, log: Path, cwd: Path) -> None:
        self.spec = spec
        self.log = log
        self.state = ChildState.WAITING
        self.exit_code: int | None = None
        self.facts: dict = {}
        self._cwd = cwd
        self._process: subprocess.Popen | None = None
        self._started_s = self._ready_s = self._died_s = 0.0
        self._num_short_lives = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        return self.state in (ChildState.STARTING, ChildState.READY)

    @property
    def startup_s(self) -> float:
        """Return the seconds from start to ready, or to now."""
        if self.state is ChildState.WAITING:
            return 0.0
        return (self._ready_s or time.monotonic()) - self._started_s

    @property
    def pause_s(self) -> float:
        """Return the seconds from its death to the next start, which grow with its short lives in a row."""
        return PAUSES_S[min(self._num_short_lives, len(PAUSES_S) - 1)]

    @property
    def is_due(self) -> bool:
        """Return whether it must be started again now."""
        return self.state is ChildState.DEAD and time.monotonic() >= self._died_s + self.pause_s

    def start(self) -> None:
        """Start it for the first time, or again after a death.

        Raises CannotFork, after which it counts as dead once more, if the machine has no room for a process.
        """
        try:
            self._process = self._fork()
        except OSError as error:
            self._process, self.state, self._died_s = None, ChildState.DEAD, time.monotonic()
            self._num_short_lives += 1
            raise CannotFork(f"{self.name} can't be started: {_explain_fork(error)}") from error
        self._started_s, self._ready_s = time.monotonic(), 0.0
        self.facts = {}
        self.state = ChildState.STARTING

    def _fork(self) -> subprocess.Popen:
        # A process group of its own: Ctrl-C at the terminal reaches only the supervisor, which ends all in order.
        with _open_log(self.log) as log:
            return subprocess.Popen(
                die_with_parent(self.spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.spec.env),
                cwd=self._cwd,
                start_new_session=True,
            )

    def refresh(self) -> bool:
        """Check whether it died or became ready; return whether that changed."""
        if not self.is_running:
            return False
        if self._has_exited():
            self._reap()
            return True
        if self.state is ChildState.READY or (facts := self.spec.is_ready()) is None:
            return False
        if facts.get("pid", self.pid) != self.pid:  # the file of a former life that could not remove it
            return False
        self.facts = facts
        self._ready_s = time.monotonic()
        self.state = ChildState.READY
        return True

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the process alone: it ends its own children."""
        # os.kill, not Popen.terminate: that would reap it first.
        if self._process is not None and self.is_running:
            os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill it at once, with everything it started."""
        if self._process is None or not self.is_running:
            return
        self._kill_group()
        self._process.wait()
        self._reap()

    def last_lines(self, count: int) -> list[str]:
        """Return the last lines of its log, without empty ones."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - TAIL_NBYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return [line.rstrip() for line in lines if line.strip()][-count:]

    def describe_exit(self) -> str:
        assert self.exit_code is not None
        return describe_exit(self.exit_code)

    def _has_exited(self) -> bool:
        """Return whether it has exited, without reaping it.

        While the zombie exists, its process group id can't be given to another process.
        """
        assert self._process is not None
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _reap(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._kill_group()  # what it may have left behind, an engine core say
        self.exit_code = self._process.wait()
        self.state = ChildState.DEAD
        self._died_s = time.monotonic()
        is_long = self._ready_s and self._died_s - self._ready_s >= LONG_LIFE_S
        self._num_short_lives = 0 if is_long else self._num_short_lives + 1

    def _kill_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # the group holds nothing but the zombie
            os.killpg(self._process.pid, signal.SIGKILL)


def _explain_fork(error: OSError) -> str:
    """Return why no process came of it, and what to do."""
    remedy = {
        errno.ENOMEM: "end other programs, or take less for the KV cache by TANDEM_KV_CACHE_MIB",
        errno.EAGAIN: "this user or container may have no more processes: raise that limit (ulimit -u, pids.max)",
    }.get(error.errno or 0, "")
    return "; ".join(filter(None, (error.strerror or str(error), remedy)))


def _open_log(path: Path) -> BinaryIO:
    """Open the log; on a disk too full for another file, the output of the process is discarded."""
    try:
        return path.open("ab")
    except OSError:
        return open(os.devnull, "ab")


def ready_file(path: Path) -> Callable[[], dict | None]:
    """Return a check for the file of facts that a process writes once it is ready.

    `path`: JSON, moved into place in one step.
    """

    def is_ready() -> dict | None:
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:  # not yet written, or removed by the process at its end
            return None

    return is_ready
