"""The rate of finished handoffs to one peer, for the placement's cost model."""

import threading
from dataclasses import dataclass

from contracts.ids import Epoch, RequestId

Key = tuple[RequestId, Epoch]

MEMORY = 0.9  # a handoff counts half after six more


@dataclass(slots=True)
class _Handoff:
    nbytes: int = 0
    busy_s: float = 0.0
    last_s: float = 0.0


class HandoffRate:
    """An exponential mean, weighted by bytes: mean bytes over mean seconds. Safe to use from any thread.

    The seconds of a handoff are those in which one of its chunks was being sent, and those from the last chunk to
    Commit; waiting for prefill to compute the next chunk does not count. Times are those of one monotonic clock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Key, _Handoff] = {}
        self._nbytes = self._seconds = 0.0

    @property
    def nbytes_per_s(self) -> float:
        """Return bytes per second; 0.0 while unknown."""
        with self._lock:
            return self._nbytes / self._seconds if self._seconds > 0 else 0.0

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
                self._nbytes = MEMORY * self._nbytes + handoff.nbytes
                self._seconds = MEMORY * self._seconds + handoff.busy_s + max(0.0, now_s - handoff.last_s)

    def dropped(self, key: Key) -> None:
        """Forget a handoff that did not finish."""
        with self._lock:
            self._open.pop(key, None)
