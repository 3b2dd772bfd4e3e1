"""A limit for a peer that accepts no data, which does not run while this process stands still."""

import time
from collections.abc import Callable

LOOKS = 5


class StallLimit:
    """A timeout counted in looks, each of which counts for at most its share of the time.

    When a process goes on that was stopped, or got no CPU, its peer may have been stopped with it.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._look_s, self._left_s, self._clock = timeout_s / LOOKS, timeout_s, clock
        self._looked_s = clock()

    def next_wait_s(self) -> float:
        """Return how many seconds to wait at most before the next look; 0.0 when the time is over."""
        now = self._clock()
        self._left_s -= min(now - self._looked_s, self._look_s)
        self._looked_s = now
        return min(max(self._left_s, 0.0), self._look_s)
