"""The end of what dead workers and gateways left, on a timer, while this process is the leader.

A worker that was silent for too long is declared dead here.

The script that does it in Redis is store/lua/reap.lua. Answers under way wait for none of this: a gateway sees the loss
of a worker by itself (gateway.dispatch.worker_link).
"""

import asyncio
import contextlib
import logging
import math
import secrets
import time

from contracts.errors import Unavailable
from coordinator.store.store import Lead, Store
from service.outage_log import OutageLog

log = logging.getLogger(__name__)

PERIOD_S = 0.2
CHECK_TURNS, MAX_UNSOUND = 5, 3
"""Once a second the leader looks whether Redis has lost something; if it says so for so many times running, it counts
all credits anew. In between workers and gateways put back what is theirs."""
LEADER_TTL_S = 2.0
SILENCE_S, GRACE_S = 0.75, 2.5
"""Behind so long without a word of the store, so long workers and gateways, which try once a second, may take to say
that they live. A shorter silence is not the end of anyone's lease."""


class Reaper:
    """The reaper of one coordinator. Several may run over one store: one of them leads.

    `is_connected`: whether the store answered last time. `is_running`: until `run` ends, as it should not by itself.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._name = secrets.token_hex(8)
        self._outage = OutageLog(log, "Redis answers again")
        self._heard_s = self._reaps_from_s = -math.inf
        self.is_leader, self.is_running = False, True
        self._num_turns = self._num_unsound = 0

    @property
    def is_connected(self) -> bool:
        return not self._outage.is_on

    async def run(self) -> None:
        """Until cancelled; then another may lead at once."""
        try:
            while True:
                await self.turn()
                await asyncio.sleep(PERIOD_S)
        finally:
            self.is_running = False
            if self.is_leader:
                with contextlib.suppress(Unavailable):  # then the lock runs out by itself
                    await self._store.resign(self._name)

    async def turn(self) -> None:
        try:
            lead = await self._store.lead(self._name, LEADER_TTL_S)
            self.is_leader, may_reap = bool(lead), self._may_reap(lead, time.monotonic())
            if self.is_leader and may_reap:
                await self._reap()
                await self._mend()
        except Unavailable as error:
            self.is_leader = False
            self._outage.failed(str(error), error.what)
        else:
            self._outage.worked()

    def _may_reap(self, lead: Lead, now: float) -> bool:
        """Return whether silence may end anything, having heard from the store just now.

        Where its clock has leapt, as behind a suspended machine, no silence is seen here, but the lock has run out with
        all leases and signs of life.
        """
        if lead is Lead.NEW or now - self._heard_s > SILENCE_S:
            self._reaps_from_s = now + GRACE_S
        self._heard_s = now
        return now >= self._reaps_from_s

    async def _mend(self) -> None:
        self._num_turns += 1
        if self._num_turns % CHECK_TURNS:
            return
        self._num_unsound = 0 if await self._store.is_sound() else self._num_unsound + 1
        if self._num_unsound == MAX_UNSOUND:
            log.warning("Redis has lost a part of its state: credits are counted anew")
            await self._store.recount()
            self._num_unsound = 0

    async def _reap(self) -> None:
        for reaped in await self._store.reap(self._name):
            log.warning(
                "request %s ended: its gateway %s is gone, or has it no longer", reaped.request_id, reaped.gateway_id
            )
