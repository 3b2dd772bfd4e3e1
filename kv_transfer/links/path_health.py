"""The decode workers that handoffs lately fail to reach, though both ends of the path may be alive."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from contracts.ids import Incarnation

FIRST_S, MAX_S = 30.0, 480.0
"""The seconds for which the first failure counts, and the most that any does.

Each that follows without a success counts twice as long, if it was a request's.
"""


@dataclass(frozen=True, slots=True)
class _Failure:
    until_s: float
    span_s: float


class PathHealth:
    """The failures that links report and the core reads, from any thread. `clock`: monotonic seconds.

    Peers are kept apart by incarnation: a worker that came back deserves another try.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[Incarnation, _Failure] = {}

    def failed(self, peer: Incarnation, was_asked: bool = True) -> None:
        """Record that a handoff or the connection to this peer failed; many at once count once.

        Unless `was_asked`, no request needed it: it counts no longer than the one before.
        """
        now = self._clock()
        with self._lock:
            former = self._failures.get(peer)
            if former is None or former.until_s <= now:
                span_s = former.span_s if former is not None else FIRST_S
                if former is not None and was_asked:
                    span_s = min(2 * span_s, MAX_S)
                self._failures[peer] = _Failure(now + span_s, span_s)

    def worked(self, peer: Incarnation) -> None:
        """Record that a handoff to this peer was committed."""
        with self._lock:
            self._failures.pop(peer, None)

    def bad(self) -> tuple[Incarnation, ...]:
        """Return the peers whose failure still counts. One that was not tried again for long is forgotten."""
        now = self._clock()
        with self._lock:
            self._failures = {peer: f for peer, f in self._failures.items() if now < f.until_s + MAX_S}
            return tuple(sorted(peer for peer, failure in self._failures.items() if now < failure.until_s))
