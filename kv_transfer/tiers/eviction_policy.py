"""The choice of what a full tier forgets: what is cheap to compute again, and used least.

There are two parts, as in W-TinyLFU (Einziger et al., ACM TOS 2017): blocks enter a window, half of the room, that
forgets the least recently used. What leaves the window competes with the least worthy of the rest, and the winner
stays. The worth is a decayed count of uses times seconds to compute per byte. The newcomer's count leaves out its
latest use, which says nothing yet about a next one: a working set a little larger than the tier then keeps a constant
part of itself, where LRU forgets each block just before it is used.
"""

import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from contracts.kv_store import BlockKey, BlockWorth

WINDOW_SHARE = 0.5
HALF_LIFE_TURNOVERS = 1.0
"""A use counts half once the bytes used since then are so many times the capacity."""
FORGOTTEN_USES = 0.4
"""A block that was used less than this, decayed, may have to go for any newcomer: 1.3 half-lives after one use."""
FORGOTTEN_LOSES = 0.25
"""The chance of that. A working set of several capacities, used in turn, is all forgotten: some of it has to stay.

Tried on traces of conversations (tests/kv_transfer/tiers/test_eviction.py): a larger chance finds more where users come
back soon, up to what LRU finds, and nothing where twice the capacity is used in turn.
"""
GHOSTS_PER_BLOCK = 2
"""The number of evicted blocks whose uses are remembered, for each that is held."""
_MIN_GHOSTS = 64


@dataclass(slots=True)
class RankedBlock:
    """A block that is held. `uses` as of `used_at`, which is in bytes used since the start."""

    nbytes: int
    worth_per_use: float
    parent: BlockKey | None
    uses: float
    used_at: float
    num_children: int = 0
    is_in_window: bool = True


class EvictionPolicy:
    """The blocks of one tier, and which of them go when room is needed. It has no lock and no clock.

    A block whose successor is held stays: the successor would be useless.
    """

    def __init__(self, capacity_nbytes: int) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.nbytes = 0
        self._now = 0.0
        self._random = random.Random(0)
        self._half_life = max(HALF_LIFE_TURNOVERS * capacity_nbytes, 1.0)
        self._entries: dict[BlockKey, RankedBlock] = {}
        self._window: OrderedDict[BlockKey, None] = OrderedDict()
        self._window_nbytes = 0
        self._ranking: list[tuple[float, BlockKey]] = []
        self._ghosts: OrderedDict[BlockKey, tuple[float, float]] = OrderedDict()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def nbytes_of(self, key: BlockKey) -> int:
        return self._entries[key].nbytes

    def add(self, key: BlockKey, nbytes: int, worth: BlockWorth) -> list[BlockKey]:
        """Hold a block that was not held; return those that had to go for it.

        It is itself among them if it is larger than the whole tier.
        """
        if nbytes > self.capacity_nbytes:
            return [key]
        self._now += nbytes
        uses, used_at = self._ghosts.pop(key, (0.0, self._now))
        entry = RankedBlock(
            nbytes=nbytes,
            worth_per_use=max(worth.compute_s, 1e-9) / nbytes,
            parent=worth.parent,
            uses=uses * self._decay(used_at) + 1.0,
            used_at=self._now,
        )
        self._entries[key] = entry
        self.nbytes += nbytes
        if worth.parent is not None and worth.parent in self._entries:
            self._entries[worth.parent].num_children += 1
        self._window[key] = None
        self._window_nbytes += nbytes
        return self._make_room()

    def use(self, keys: Iterable[BlockKey]) -> None:
        """Note that these blocks of one prompt, first to last, were used."""
        for key in reversed(list(keys)):  # the first are the last to go
            entry = self._entries.get(key)
            if entry is None:
                continue
            self._now += entry.nbytes
            entry.uses = entry.uses * self._decay(entry.used_at) + 1.0
            entry.used_at = self._now
            if entry.is_in_window:
                self._window.move_to_end(key)
            else:
                self._rank(key, entry)

    def remove(self, key: BlockKey) -> None:
        """Forget a block without a trace."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.nbytes -= entry.nbytes
        if entry.is_in_window:
            del self._window[key]
            self._window_nbytes -= entry.nbytes
        parent = self._entries.get(entry.parent) if entry.parent is not None else None
        if parent is not None and entry.parent is not None and parent.num_children:
            parent.num_children -= 1
            if not parent.num_children and not parent.is_in_window:
                self._rank(entry.parent, parent)

    def _make_room(self) -> list[BlockKey]:
        """Move what is too much for the window into the rest, and what is too much for the rest out."""
        evicted: list[BlockKey] = []
        while self._window_nbytes > WINDOW_SHARE * self.capacity_nbytes and (key := self._oldest_of_window()):
            entry = self._entries[key]
            self._window_nbytes -= entry.nbytes
            del self._window[key]
            entry.is_in_window = False
            if self.nbytes <= self.capacity_nbytes:
                self._rank(key, entry)
                continue
            evicted.append(self._loser(key, entry))
        while self.nbytes > self.capacity_nbytes:
            victim = self._least_worthy() or self._oldest_of_window() or next(iter(self._entries))
            self._forget(victim)
            evicted.append(victim)
        return evicted

    def _oldest_of_window(self) -> BlockKey | None:
        """Return the least recently used without a successor; none stands far behind, see `use`."""
        return next((key for key in self._window if not self._entries[key].num_children), None)

    def _loser(self, key: BlockKey, entry: RankedBlock) -> BlockKey:
        """Forget the newcomer or the least worthy of the rest, and return it."""
        rival_key = self._least_worthy()
        if rival_key is None:
            self._forget(key)
            return key
        rival = self._entries[rival_key]
        rival_uses = rival.uses * self._decay(rival.used_at)
        earlier_uses = (entry.uses - 1.0) * self._decay(entry.used_at)
        is_better = earlier_uses * entry.worth_per_use > rival_uses * rival.worth_per_use
        if is_better or (rival_uses < FORGOTTEN_USES and self._random.random() < FORGOTTEN_LOSES):
            self._rank(key, entry)
            self._forget(rival_key)
            return rival_key
        self._forget(key)
        self._rank(rival_key, rival)
        return key

    def _least_worthy(self) -> BlockKey | None:
        """Take the first of the ranking that has no successor; it is in the ranking no more."""
        while self._ranking:
            rank, key = heapq.heappop(self._ranking)
            entry = self._entries.get(key)
            if entry is not None and not entry.is_in_window and not entry.num_children and rank == self._rank_of(entry):
                return key
        return None

    def _rank(self, key: BlockKey, entry: RankedBlock) -> None:
        heapq.heappush(self._ranking, (self._rank_of(entry), key))
        if len(self._ranking) > 4 * len(self._entries) + _MIN_GHOSTS:  # mostly ranks that blocks had before
            current = {(self._rank_of(e), k) for k, e in self._entries.items() if not e.is_in_window}
            self._ranking = sorted(current)

    def _rank_of(self, entry: RankedBlock) -> float:
        """Return log2 of the worth, decayed to time 0.

        It orders blocks as their worth now does, and stays when time passes.
        """
        return math.log2(entry.uses * entry.worth_per_use) + entry.used_at / self._half_life

    def _forget(self, key: BlockKey) -> None:
        entry = self._entries[key]
        self.remove(key)
        self._ghosts[key] = entry.uses, entry.used_at
        while len(self._ghosts) > GHOSTS_PER_BLOCK * len(self._entries) + _MIN_GHOSTS:
            self._ghosts.popitem(last=False)

    def _decay(self, since: float) -> float:
        return 2.0 ** ((since - self._now) / self._half_life)
