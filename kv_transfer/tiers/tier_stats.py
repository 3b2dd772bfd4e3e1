"""The counters of one tier."""

import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


class LoadCount:
    """One read that is being counted."""

    def __init__(self, stats: "TierStats") -> None:
        self._stats = stats

    def found(self, sizes: Sequence[int], num_wanted: int) -> None:
        """Count what was read of what was asked for."""
        self._stats.num_hits += len(sizes)
        self._stats.num_misses += num_wanted - len(sizes)
        self._stats.nbytes_out += sum(sizes)


@dataclass
class TierStats:
    """Counts since the start: blocks, bytes, seconds.

    `refused`: records that were not kept, or not used, by reason.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_loads: int = 0
    num_stored: int = 0
    num_evicted: int = 0
    nbytes_in: int = 0
    nbytes_out: int = 0
    load_s: float = 0.0
    refused: Counter[str] = field(default_factory=Counter[str])

    @contextmanager
    def load(self) -> Generator[LoadCount, None, None]:
        """Count a read and the time it takes."""
        start = time.perf_counter()
        try:
            yield LoadCount(self)
        finally:
            self.num_loads += 1
            self.load_s += time.perf_counter() - start

    def stored(self, nbytes: int) -> None:
        self.num_stored += 1
        self.nbytes_in += nbytes

    def report(self, num_blocks: int, nbytes: int) -> dict[str, float]:
        """Return them by metric names without a prefix, beside how much the tier holds now."""
        refused = {f"refused_{reason}": float(count) for reason, count in sorted(self.refused.items())}
        return refused | {
            "hit_blocks": self.num_hits,
            "missed_blocks": self.num_misses,
            "loads": self.num_loads,
            "stored_blocks": self.num_stored,
            "evicted_blocks": self.num_evicted,
            "bytes_in": self.nbytes_in,
            "bytes_out": self.nbytes_out,
            "load_seconds": self.load_s,
            "blocks": num_blocks,
            "bytes": nbytes,
        }
