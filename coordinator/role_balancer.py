"""Turns workers from one role to another as the policy says, while this coordinator leads."""

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp

from contracts.errors import TandemError, Unavailable
from coordinator.role_balance import RoleBalance, RoleChange
from coordinator.store.store import Store

log = logging.getLogger(__name__)

PERIOD_S = 1.0
CALL_TIMEOUT_S = 5.0


class RoleBalancer:
    """The balancer of one coordinator; several may run, and that which leads changes roles.

    `objective_s`: how long prompts may wait. `is_leader`: of the reaper, whose lease in Redis decides.
    """

    def __init__(self, store: Store, secret: str, objective_s: float, is_leader: Callable[[], bool]) -> None:
        self._store, self._secret, self._is_leader = store, secret, is_leader
        self._balance = RoleBalance(objective_s)
        self.is_running = True

    async def run(self) -> None:
        """Run until cancelled; `is_running` says whether it does."""
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)) as session:
                while True:
                    await asyncio.sleep(PERIOD_S)
                    if self._is_leader():
                        await self.turn(session, time.monotonic())
        finally:
            self.is_running = False

    async def turn(self, session: aiohttp.ClientSession, now: float) -> None:
        """Look at the pool once, and make the change that is due."""
        try:
            workers = await self._store.workers()
        except Unavailable:
            return  # the reaper says so
        change = self._balance.decide(workers, now)
        if change is None:
            return
        self._balance.on_changed(now)
        worker_id, role = change.worker.node.info.worker_id, change.role.value
        try:
            await self._ask(session, change)
        except (TandemError, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("worker %s does not turn to %s: %s", worker_id, role, error or type(error).__name__)
        else:
            log.info("worker %s turns to %s: %s", worker_id, role, change.reason)

    async def _ask(self, session: aiohttp.ClientSession, change: RoleChange) -> None:
        """Ask the worker. Raises Unavailable with its words if it does not turn."""
        headers, body = {"Authorization": f"Bearer {self._secret}"}, {"role": change.role.value}
        async with session.post(f"{change.worker.node.info.url}/role", json=body, headers=headers) as response:
            if response.status != 200:
                raise Unavailable(f"it answers {response.status}: {(await response.text())[:200]}")
