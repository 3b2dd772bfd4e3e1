"""How fast handoffs to one peer finish, measured on those that did: for the placement's cost model."""

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
    """An exponential mean, weighted by bytes: mean bytes over mean seconds. Any thread may tell or ask.

    The seconds of a handoff are those in which one of its chunks was being sent, and those from the last chunk to
    Commit; waiting for prefill to compute the next chunk is not the transfer's. Times are those of one monotonic clock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Key, _Handoff] = {}
        self._nbytes = self._seconds = 0.0

    @property
    def nbytes_per_s(self) -> float:
        """0.0 while unknown."""
        with self._lock:
            return self._nbytes / self._seconds if self._seconds > 0 else 0.0

    def begin(self, key: Key) -> None:
        with self._lock:
            self._open[key] = _Handoff()

    def sent(self, key: Key, nbytes: int, start_s: float, end_s: float) -> None:
        """A chunk left between these times. Ignored if the handoff is over."""
        with self._lock:
            if handoff := self._open.get(key):
                handoff.nbytes += nbytes
                handoff.busy_s += end_s - start_s
                handoff.last_s = end_s

    def told(self, key: Key, nbytes: int, now_s: float) -> None:
        """Decode was told of a chunk, and fetches it while prefill computes, unseen from here: what can be timed is the
        last one. Ignored if the handoff is over: an Abort may come while it is said.
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
        """It did not finish, so it says nothing."""
        with self._lock:
            self._open.pop(key, None)
