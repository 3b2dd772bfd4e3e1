"""The supervisor, which starts the processes of a system in stages, watches them and ends them all."""

import time
from collections.abc import Callable, Sequence
from itertools import groupby

from rich.console import Console

from contracts.errors import ConfigError
from tandem.local.child import CannotFork, ChildProcess, ChildState
from tandem.local.console_output import Progress, plain
from tandem.local.signals import SignalInbox

POLL_PERIOD_S = 0.1
WATCH_PERIOD_S = 1.0
NUM_LAST_LINES = 10


class StopRequested(Exception):
    """The user pressed Ctrl-C, or SIGTERM came, while the system was starting."""


class VitalDeath(Exception):
    """A process that the system can't do without has died."""


class Supervisor:
    """The owner of the children from the first start to the last end.

    Use it inside a SignalInbox, and call `stop()` in a finally. `on_change` is called after each change of a child's
    state. The first request to stop ends children in order, with a grace period for each; the second kills what is left
    at once.
    """

    def __init__(
        self, children: Sequence[ChildProcess], inbox: SignalInbox, console: Console, on_change: Callable[[], None]
    ) -> None:
        self._children = children
        self._inbox = inbox
        self._console = console
        self._on_change = on_change

    def start(self, timeout_s: float) -> None:
        """Start all children and return when they are ready.

        Raises ConfigError if one can't start or time is over, StopRequested.
        """
        deadline_s = time.monotonic() + timeout_s
        with Progress(self._console, self._children) as progress:
            for number, stage in groupby(sorted(self._children, key=_stage), key=_stage):
                for child in self._children:
                    if child.state is ChildState.WAITING and child.spec.first_stage <= number:
                        _start_first(child)
                self._await_stage(list(stage), progress, deadline_s)

    def wait_for(self, is_done: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Watch the children until `is_done()`.

        Raises ConfigError naming `what` when time is over, StopRequested.
        """
        deadline_s = time.monotonic() + timeout_s
        while not is_done():
            self._wait(POLL_PERIOD_S)
            if self._changed():
                self._require_alive()
            if time.monotonic() > deadline_s:
                raise ConfigError(f"{what} did not happen within {timeout_s:.0f} s; the logs may say why")

    def watch(self) -> None:
        """Watch the children, starting dead ones again, and return when asked to stop.

        Raises VitalDeath if a vital one dies.
        """
        while self._inbox.num_stops == 0:
            self._start_again()
            self._inbox.wait(WATCH_PERIOD_S)
            for child in self._changed():
                if child.state is ChildState.READY:
                    plain(self._console, f"{child.name} is ready again after {child.startup_s:.1f} s")
                    continue
                self._tell_death(child)
                if child.spec.is_vital:
                    raise VitalDeath(f"{child.name} is gone, and nothing works without it: stopping")

    def stop(self) -> None:
        """End all children, last stage first, and return when none is left."""
        num_stops = self._inbox.num_stops
        stages = groupby(sorted(self._children, key=_stage, reverse=True), key=_stage)
        for _, stage in stages:
            self._stop_stage(list(stage), num_stops)
        for child in self._children:
            child.kill()
        self._on_change()

    def _await_stage(self, stage: list[ChildProcess], progress: Progress, deadline_s: float) -> None:
        self._on_change()
        while any(child.state is not ChildState.READY for child in stage):
            progress.update()
            self._wait(POLL_PERIOD_S)
            if self._changed():
                self._require_alive()
            late = [child for child in stage if child.state is not ChildState.READY]
            if late and time.monotonic() > deadline_s:
                raise ConfigError(f"{late[0].name} is not ready after {late[0].startup_s:.0f} s; see {late[0].log}")
        progress.update()

    def _wait(self, timeout_s: float) -> None:
        self._inbox.wait(timeout_s)
        if self._inbox.num_stops:
            raise StopRequested

    def _changed(self) -> list[ChildProcess]:
        """Return the children that died or became ready since the last call."""
        changed = [child for child in self._children if child.refresh()]
        if changed:
            self._on_change()
        return changed

    def _start_again(self) -> None:
        due = [child for child in self._children if child.is_due]
        for child in due:
            try:
                child.start()
            except CannotFork as error:
                again = f"in {child.pause_s:.0f} s" if child.pause_s else "soon"
                plain(self._console, f"{error}. It is tried again {again}")
        if due:
            self._on_change()

    def _require_alive(self) -> None:
        dead = [child for child in self._children if child.state is ChildState.DEAD]
        if dead:
            raise ConfigError(explain_failed_start(dead[0]))

    def _tell_death(self, child: ChildProcess) -> None:
        plain(self._console, f"{child.name} {child.describe_exit()}; the end of {child.log}:")
        for line in child.last_lines(NUM_LAST_LINES):
            plain(self._console, f"    {line}")
        if not child.spec.is_vital:
            plain(self._console, f"{child.name} starts again" + (f" in {child.pause_s:.0f} s" if child.pause_s else ""))

    def _stop_stage(self, stage: list[ChildProcess], num_stops: int) -> None:
        """Send SIGTERM to all of a stage, wait, then kill. A further request to stop ends the wait."""
        for child in stage:
            child.ask_to_stop()
        deadline_s = time.monotonic() + max(child.spec.stop_timeout_s for child in stage)
        while any(child.is_running for child in stage):
            if time.monotonic() > deadline_s or self._inbox.num_stops > num_stops:
                break
            self._inbox.wait(POLL_PERIOD_S)
            self._changed()
        for child in stage:
            child.kill()


def explain_failed_start(child: ChildProcess) -> str:
    """Return the error that a process printed, else the last lines of its log.

    The error is what follows its last `tandem NAME: ...`.
    """
    lines = child.last_lines(NUM_LAST_LINES)
    spoken = max((index for index, line in enumerate(lines) if line.startswith("tandem ")), default=None)
    if spoken is not None:
        words = " ".join(line.strip() for line in lines[spoken:])
        words = words.replace("the log above", str(child.log))  # above this message in the log, but not on the terminal
        return f"{child.name} could not start: {words.partition(': ')[2]}"
    said = "".join(f"\n    {line}" for line in lines)
    return f"{child.name} {child.describe_exit()} while starting; the end of {child.log}:{said}"


def _start_first(child: ChildProcess) -> None:
    try:
        child.start()
    except CannotFork as error:
        raise ConfigError(str(error)) from error


def _stage(child: ChildProcess) -> int:
    return child.spec.stage
