"""The turns of requests that wait: fair among tenants, and first come, first served within one.

Start-time fair queueing (Goyal, Vin and Cheng 1996): a request's turn is the virtual time at which its tenant's earlier
requests end, or now if that is later; it ends its cost over the tenant's weight after that. Virtual time is the turn of
the request that was begun last. So a tenant that sends much waits behind its own requests, and who sends little comes
first, whatever is waiting. One tenant alone is served as without turns. No clock.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import nlargest
from operator import itemgetter

Turn = tuple[float, int]
"""A place in the order of one priority: virtual time, then arrival. The smallest goes first."""
Urgency = tuple[int, Turn]
"""A place in the order of all: priority, then turn. The smallest goes first."""
MOST_BANDS, MOST_TENANTS = 64, 1024


@dataclass
class _Band:
    """The virtual time of one priority, and until when its tenants' requests take."""

    now: float = 0.0
    ends: dict[str, float] = field(default_factory=dict[str, float])


class FairTurns:
    """The giver of turns.

    Clients choose priorities: of more than MOST_BANDS the one that was used longest ago starts anew.
    """

    def __init__(self) -> None:
        self._bands: OrderedDict[int, _Band] = OrderedDict()
        self._num_given, self._floor = 0, 0.0

    def give(self, priority: int, tenant: str, cost: float) -> Turn:
        """Return the turn of a request that comes now. `cost`: its tokens over its tenant's weight."""
        band = self._band(priority)
        start = max(band.now, band.ends.get(tenant, 0.0))
        band.ends[tenant] = start + cost
        if len(band.ends) > MOST_TENANTS:  # those that are owed the least begin anew
            band.ends = dict(nlargest(MOST_TENANTS // 2, band.ends.items(), key=itemgetter(1)))
        self._num_given += 1
        return start, self._num_given - 1

    def begin(self, priority: int, turn: Turn) -> None:
        """Let virtual time come to a turn that is served now."""
        band = self._band(priority)
        band.now = max(band.now, turn[0])

    def give_back(self, priority: int, tenant: str, cost: float) -> None:
        """Take back what a request cost that was never begun: its tenant's next ones come sooner."""
        ends = self._band(priority).ends
        if tenant in ends:
            ends[tenant] -= cost

    def _band(self, priority: int) -> _Band:
        if (band := self._bands.get(priority)) is None:
            band = self._bands[priority] = _Band(now=self._floor)
        self._bands.move_to_end(priority)
        if len(self._bands) > MOST_BANDS:  # a band that begins anew begins behind all turns that wait in it
            _, old = self._bands.popitem(last=False)
            self._floor = max(self._floor, old.now, *old.ends.values())
        return band
