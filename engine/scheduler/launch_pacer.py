"""The time until which the next batch may be launched.

The device is to have it before it is done with what it has.

One that is launched at once leaves out whoever is handed over in the meantime: they wait for the batch that runs, for
that one, and for a third.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence

from engine.scheduler.batch import ScheduledChunk

Kind = tuple[int, int]
"""Batches of about as many tokens of prompts, and of about as many answers, take about as long."""

NUM_LAST = 8
WAKING_S = 0.0002
"""How late a thread wakes up that slept until some moment (0.1 to 0.2 ms on virtual machines)."""


def kind_of(pieces: Sequence[ScheduledChunk]) -> Kind:
    num_decodes = sum(piece.is_decode for piece in pieces)
    num_prefill = sum(piece.num_tokens for piece in pieces) - num_decodes
    return -(-num_prefill // 64), -(-num_decodes // 8)


class LaunchPacer:
    """Times are seconds of one clock."""

    def __init__(self) -> None:
        self._spans: defaultdict[Kind, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_LAST))
        self._launches: deque[float] = deque([0.0] * NUM_LAST, NUM_LAST)
        self._completed_s = -math.inf

    def record_launch(self, span_s: float) -> None:
        """The host took so long for a batch."""
        self._launches.append(span_s)

    def record_completion(self, kind: Kind, began_s: float, now_s: float, was_late: bool = False) -> float:
        """A batch that was begun on then is computed now.

        Returns how long that took, behind the one before it. `was_late`: it was computed before anybody looked, so what
        is known of its kind is too long. It is forgotten: else a batch that was slow once would make those behind it
        wait as long, and each of them would say so again.
        """
        span_s, self._completed_s = now_s - max(began_s, self._completed_s), now_s
        if was_late:
            self._spans.pop(kind, None)
        else:
            self._spans[kind].append(span_s)
        return span_s

    def due_s(self, kind: Kind, began_s: float) -> float:
        """When to begin on the batch behind the one that is being computed.

        Past if it is not known how long that takes. The shortest of the last ones of its kind counts: what is launched
        too early costs less than a device that waits.
        """
        spans = self._spans.get(kind)
        if not spans:
            return -math.inf
        done_s = max(began_s, self._completed_s) + min(spans)
        # The second longest of the last launches: one of them, of a long prompt, may have taken fifty times as long.
        return done_s - sorted(self._launches)[-2] - WAKING_S
