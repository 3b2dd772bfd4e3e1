"""The guard of a service that may be down: after failures in a row it is left alone for a while."""

from collections.abc import Callable

MAX_FAILURES = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class CircuitBreaker:
    """It opens after MAX_FAILURES in a row, then lets one call through after each pause.

    The pause doubles from FIRST_PAUSE_S to LONGEST_PAUSE_S. `on_change` is told whether it is closed now, and why.
    """

    def __init__(self, clock: Callable[[], float], on_change: Callable[[bool, str], None]) -> None:
        self._clock, self._on_change = clock, on_change
        self._num_failures = 0
        self._pause_s = 0.0
        self._next_try_s = 0.0

    @property
    def is_closed(self) -> bool:
        """Return whether the service is believed to work."""
        return self._pause_s == 0.0

    def may_call(self) -> bool:
        """Return whether to call now; while it is open, True once in a pause."""
        if self.is_closed:
            return True
        if self._clock() < self._next_try_s:
            return False
        self._next_try_s = self._clock() + self._pause_s
        return True

    def succeeded(self) -> None:
        was_closed, self._num_failures, self._pause_s = self.is_closed, 0, 0.0
        if not was_closed:
            self._on_change(True, "")

    def failed(self, reason: str) -> None:
        self._num_failures += 1
        if self._num_failures < MAX_FAILURES:
            return
        was_closed = self.is_closed
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._next_try_s = self._clock() + self._pause_s
        if was_closed:
            self._on_change(False, reason)
