"""Signals as events to wait for, which never interrupt the code between two lines."""

import os
import select
import signal
from types import FrameType, TracebackType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """A counter of requests to stop, which with the deaths of children wake `wait()` while it is open.

    A hangup that is ignored already, as under `nohup`, stays ignored. Main thread only, as the `signal` module demands.
    """

    def __init__(self) -> None:
        self.num_stops = 0

    def __enter__(self) -> "SignalInbox":
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._former_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        heeded = {*STOPPING, signal.SIGCHLD}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            heeded.remove(signal.SIGHUP)
        self._former = {number: signal.signal(number, _ignore) for number in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, timeout_s: float) -> None:
        """Return when a signal came or `timeout_s` is over."""
        if select.select([self._reader], [], [], timeout_s)[0]:
            numbers = os.read(self._reader, 4096)
            self.num_stops += sum(number in STOPPING for number in numbers)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal is in the wakeup descriptor already."""
