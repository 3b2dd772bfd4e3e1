"""Which decode workers handoffs do not reach lately: a path is bad, though both of its ends may live."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from contracts.ids import Incarnation

FIRST_S, MAX_S = 30.0, 480.0
"""How long the first failure counts, and at most; each that follows without a success counts twice as long, if
it was a request's."""


@dataclass(frozen=True, slots=True)
class _Failure:
    until_s: float
    span_s: float


class PathHealth:
    """Told by links, asked by the core; any thread may do either. `clock`: monotonic seconds.

    Peers are told apart by incarnation: a worker that came back deserves another try.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[Incarnation, _Failure] = {}

    def failed(self, peer: Incarnation, was_asked: bool = True) -> None:
        """A handoff there, or the connection, failed. Many fail at once, which counts once. Unless `was_asked`, no
        request needed it: it counts no longer than the one before.
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
        """A handoff there was committed."""
        with self._lock:
            self._failures.pop(peer, None)

    def bad(self) -> tuple[Incarnation, ...]:
        """Those whose failure counts still. One that nobody tried for so long again is forgotten."""
        now = self._clock()
        with self._lock:
            self._failures = {peer: f for peer, f in self._failures.items() if now < f.until_s + MAX_S}
            return tuple(sorted(peer for peer, failure in self._failures.items() if now < failure.until_s))
