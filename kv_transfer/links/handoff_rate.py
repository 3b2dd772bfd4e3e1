"""The rate of finished handoffs to one peer, for the placement's cost model."""

import threading
from dataclasses import dataclass

from contracts.ids import Epoch, RequestId

Key = tuple[RequestId, Epoch]

MEMORY = 0.9  # a handoff counts half after six more
MIN_SPREAD = 0.25
"""The variance of sizes over their squared mean from which on latency is told from rate: of one size and its triple."""
MIN_COUNT = 5.0
"""The sum of weights from which on it is: seven handoffs."""
MIN_ERRORS = 3.0
"""How many standard errors above zero the slope must be: else it may be that of noise, and its inverse any number."""


@dataclass(slots=True)
class _Handoff:
    nbytes: int = 0
    busy_s: float = 0.0
    last_s: float = 0.0


@dataclass(slots=True)
class _Sums:
    """Sums over finished handoffs, each former one `MEMORY` times what the next one counts."""

    count: float = 0.0
    nbytes: float = 0.0
    seconds: float = 0.0
    nbytes_squared: float = 0.0
    nbytes_seconds: float = 0.0
    seconds_squared: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        self.count = MEMORY * self.count + 1
        self.nbytes = MEMORY * self.nbytes + nbytes
        self.seconds = MEMORY * self.seconds + seconds
        self.nbytes_squared = MEMORY * self.nbytes_squared + nbytes * nbytes
        self.nbytes_seconds = MEMORY * self.nbytes_seconds + nbytes * seconds
        self.seconds_squared = MEMORY * self.seconds_squared + seconds * seconds

    @property
    def nbytes_per_s(self) -> float:
        """Return the rate behind the latency, or bytes over seconds where the two can't be told apart."""
        if self.seconds <= 0:
            return 0.0
        variance = self.count * self.nbytes_squared - self.nbytes**2
        covariance = self.count * self.nbytes_seconds - self.nbytes * self.seconds
        has_latency = variance * self.seconds > covariance * self.nbytes  # the line meets zero bytes above zero seconds
        is_spread = self.count >= MIN_COUNT and variance >= MIN_SPREAD * self.nbytes**2
        if is_spread and covariance > 0 and has_latency and self._is_significant(variance, covariance):
            return variance / covariance
        return self.nbytes / self.seconds

    def _is_significant(self, variance: float, covariance: float) -> bool:
        """Return whether the slope is MIN_ERRORS of its standard errors above zero.

        The error's square is `residual / (count - 2) / variance` in these units, where `residual` is what the line
        leaves of the variance of seconds.
        """
        of_seconds = self.count * self.seconds_squared - self.seconds**2
        residual = of_seconds - covariance**2 / variance
        return covariance**2 * (self.count - 2) > MIN_ERRORS**2 * residual * variance


class HandoffRate:
    """The line of seconds by bytes through finished handoffs (least squares). Safe to use from any thread.

    Its slope is the rate: what each takes however small it is says nothing of how long a large one takes. Where noise
    hides the slope, it is bytes over seconds, which latency makes slower than the link.

    The seconds of a handoff are those in which one of its chunks was being sent, and those from the last chunk to
    Commit; waiting for prefill to compute the next chunk does not count. Times are those of one monotonic clock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Key, _Handoff] = {}
        self._sums = _Sums()

    @property
    def nbytes_per_s(self) -> float:
        """Return bytes per second; 0.0 while unknown."""
        with self._lock:
            return self._sums.nbytes_per_s

    def begin(self, key: Key) -> None:
        with self._lock:
            self._open[key] = _Handoff()

    def sent(self, key: Key, nbytes: int, start_s: float, end_s: float) -> None:
        """Record a chunk that was sent between these times; ignored if the handoff is over."""
        with self._lock:
            if handoff := self._open.get(key):
                handoff.nbytes += nbytes
                handoff.busy_s += end_s - start_s
                handoff.last_s = end_s

    def reported(self, key: Key, nbytes: int, now_s: float) -> None:
        """Record a chunk that was reported to decode.

        Decode fetches it while prefill computes, unseen from here: only the last one can be timed. Ignored if the
        handoff is over: an Abort may come at the same time.
        """
        with self._lock:
            if key in self._open:
                self._open[key] = _Handoff(nbytes, 0.0, now_s)

    def committed(self, key: Key, now_s: float) -> None:
        with self._lock:
            handoff = self._open.pop(key, None)
            if handoff is not None and handoff.nbytes:
                self._sums.add(handoff.nbytes, handoff.busy_s + max(0.0, now_s - handoff.last_s))

    def dropped(self, key: Key) -> None:
        """Forget a handoff that did not finish."""
        with self._lock:
            self._open.pop(key, None)
