"""The publication, in the registry, of which prefixes the tiers of this worker hold."""

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from contracts.errors import Unavailable
from contracts.held_prefixes import MAX_MARKS, HeldChange
from coordinator.store.store import HELD_KEPT_S, SHARED_TIER, Store
from service.outage_log import OutageLog
from worker.front.worker_state import WorkerState

log = logging.getLogger(__name__)

PERIOD_S = 0.25
MAX_NEWS, MAX_RENEWED = 256, 32
"""Marks that one call publishes: what is new, and what is told again. Redis needs some microseconds for each; all that
a tier holds is told again within some minutes."""
MAX_WAITING = 4 * MAX_MARKS
"""News that wait to be published: more than all tiers hold as they open; of more the oldest goes."""
RENEW_S = HELD_KEPT_S / 2
_Mark = tuple[str, bytes]


class HeldPublisher:
    """What the tiers of one worker hold, and what of it the registry is still to be told.

    The registry forgets a mark unless it is told again, and all of them when it loses this worker. What is in a store
    that workers share is told once: whoever sees it there tells it anew. A mark that goes before the registry can have
    heard of it is not told at all. `clock`: monotonic seconds.
    """

    def __init__(self, store: Store, state: WorkerState, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._state, self._clock = store, state, clock
        self._news: OrderedDict[_Mark, bool] = OrderedDict()
        self._told_s: OrderedDict[_Mark, float] = OrderedDict()
        self._sent: set[_Mark] = set()  # the registry may have heard that these are held
        self._num_joins = 0
        self._outage = OutageLog(log)

    def add(self, changes: Iterable[HeldChange]) -> None:
        """Take in what changed; of a mark that changed several times the last counts."""
        for change in changes:
            mark = change.tier, change.key
            self._news.pop(mark, None)
            if not change.is_held:
                self._told_s.pop(mark, None)
            if change.is_held or mark in self._sent or change.tier == SHARED_TIER:
                self._news[mark] = change.is_held
        while len(self._news) > MAX_WAITING:
            self._drop(*self._news.popitem(last=False))

    def _drop(self, mark: _Mark, is_held: bool) -> None:
        """Do without some news: what is held comes with what is told again.

        What is not held any more is told no more, so the registry forgets it.
        """
        if not is_held:
            self._sent.discard(mark)
        elif mark[0] != SHARED_TIER:
            self._told_s[mark] = -math.inf
            self._told_s.move_to_end(mark, last=False)

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.publish()

    async def publish(self) -> None:
        """Tell the registry some of what it does not know; again at the next call, if it can't be reached now."""
        info, now = self._state.info, self._clock()
        if self._num_joins != self._state.num_joins:  # what was told of a former join leads nowhere
            self._num_joins = self._state.num_joins
            self._told_s = OrderedDict.fromkeys(self._told_s, -math.inf)
        news = dict(islice(self._news.items(), MAX_NEWS))
        renewed = [mark for mark, told_s in islice(self._told_s.items(), MAX_RENEWED) if now - told_s > RENEW_S]
        if not (news or renewed):
            return
        told = dict.fromkeys(renewed, True) | news
        changes = [HeldChange(tier, key, is_held) for (tier, key), is_held in told.items()]
        self._sent.update(mark for mark, is_held in told.items() if is_held and mark[0] != SHARED_TIER)
        try:
            is_noted = await self._store.publish_held(info.worker_id, info.incarnation, changes)
        except Unavailable as error:
            self._outage.failed(f"what tiers hold has not reached the registry yet: {error}", error.what)
            return
        self._outage.worked()
        if is_noted:
            self._on_told(told, now)

    def _on_told(self, told: dict[_Mark, bool], now: float) -> None:
        for mark, is_held in told.items():
            if self._news.get(mark) == is_held:
                del self._news[mark]
                if not is_held:
                    self._sent.discard(mark)
            # What went while it was being told is among the news, or was, if these were too many.
            if is_held and mark[0] != SHARED_TIER and mark in self._sent and self._news.get(mark, True):
                self._told_s[mark] = now
                self._told_s.move_to_end(mark)
