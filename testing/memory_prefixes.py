"""What MemoryStore remembers of prefixes: who served them, and whose tiers hold them."""

from collections.abc import Sequence

from contracts.held_prefixes import HeldChange
from coordinator.store.store import HELD_KEPT_S, MAX_HELD_BY, SHARED_TIER

Lines = dict[bytes, tuple[bytes, float]]
"""A line of holders by hash or key, and until when it is remembered, in seconds."""


class MemoryPrefixes:
    """The holders of prefixes, as coordinator.placement.prefixes writes them, and those of blocks."""

    def __init__(self) -> None:
        self._served: Lines = {}
        self._held: Lines = {}

    def look_up(self, hashes: Sequence[bytes], blocks: Sequence[bytes], now: float) -> list[bytes]:
        return [_line(self._served, digest, now) for digest in hashes] + [_line(self._held, key, now) for key in blocks]

    def serve(self, prefixes: Sequence[tuple[bytes, bytes]], holders: list[bytes], until_s: float) -> None:
        """Put holders before the others of each prefix."""
        for digest, others in prefixes:
            self._served[digest] = b" ".join(holders) + others, until_s

    def note(self, changes: Sequence[HeldChange], term: str, now: float) -> None:
        """Note what the tiers of the worker who joined as `term` hold, or hold no more."""
        for change in changes:
            item = f"{'*' if change.tier == SHARED_TIER else term}:{change.tier}".encode()
            others = [other for other in _line(self._held, change.key, now).split() if other != item]
            if change.is_held:
                self._held[change.key] = b" ".join([item, *others][:MAX_HELD_BY]), now + HELD_KEPT_S
            elif others:
                self._held[change.key] = b" ".join(others), self._held[change.key][1]
            else:
                self._held.pop(change.key, None)


def _line(lines: Lines, name: bytes, now: float) -> bytes:
    line, until_s = lines.get(name, (b"", now))
    return line if now < until_s else b""
