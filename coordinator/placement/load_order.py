"""The orders and indices in which a view of the pool finds workers without a look at all of them."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator

from contracts.ids import WorkerId


class LoadOrder:
    """Workers in the order of their load, then of their ids."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, WorkerId]] = []

    def put(self, worker_id: WorkerId, load_s: float) -> None:
        insort(self.rows, (load_s, worker_id))

    def start(self, now_s: float, most: int, salt: int) -> int:
        """Return where to look first: among those without a queue by now, if they are more than are looked at."""
        num_idle = bisect_left(self.rows, (now_s,))
        return salt % (num_idle - most) if num_idle > most else 0

    def discard(self, worker_id: WorkerId, load_s: float) -> None:
        del self.rows[bisect_left(self.rows, (load_s, worker_id))]


class WordIndex:
    """Workers by the ways in which they send, or take, KV. Most have the same."""

    def __init__(self) -> None:
        self._workers: defaultdict[frozenset[str], set[WorkerId]] = defaultdict(set)

    def add(self, words: frozenset[str], worker_id: WorkerId) -> None:
        self._workers[words].add(worker_id)

    def discard(self, words: frozenset[str], worker_id: WorkerId) -> None:
        self._workers[words].discard(worker_id)
        if not self._workers[words]:
            del self._workers[words]

    def meeting(self, words: frozenset[str]) -> Iterator[WorkerId]:
        return (worker_id for those, ids in self._workers.items() if not those.isdisjoint(words) for worker_id in ids)


def lonely(words: set[frozenset[str]], others: set[frozenset[str]]) -> list[frozenset[str]]:
    """Return those that have no word in common with any of the others."""
    return [those for those in words if all(those.isdisjoint(other) for other in others)]
