"""The migration of answers away from workers that drain, so that none is replayed or waited for."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from contracts.errors import TandemError
from contracts.ids import GatewayId, WorkerId
from contracts.request import Route, WorkerRef
from coordinator.placement.policy import decode_need
from gateway.dispatch.placement import Placement
from gateway.dispatch.request_actions import Action
from gateway.dispatch.request_state_machine import InflightRequest
from gateway.dispatch.worker_pool import WorkerPool
from service.tasks import spawn_into

log = logging.getLogger(__name__)

LOOK_PERIOD_S = 0.1
MAX_AT_ONCE = 16
"""Migrations of one gateway at once: each holds pages at two workers, and shares the links with handoffs."""
TIMEOUT_S = 15.0
"""The seconds after which a migration that is not decided is given up; a source gives up sooner."""
RETRY_S = 1.0
"""How long an answer waits that could not move, before it is tried again."""

Perform = Callable[[InflightRequest, Sequence[Action]], None]


class DrainMigrations:
    """Owned by the event loop. `perform`: does what has become of an answer."""

    def __init__(self, store: Placement, gateway_id: GatewayId, workers: WorkerPool, perform: Perform) -> None:
        self._store, self._gateway_id, self._workers, self._perform = store, gateway_id, workers, perform
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_committed = self.num_failed = 0

    async def run(self, live: Callable[[], Iterable[InflightRequest]]) -> None:
        """Move what may be moved, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            if draining := frozenset(self._workers.draining):
                self._begin(live(), draining)

    async def stop(self) -> None:
        """Begin nothing more, and wait for what was begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def ended(self, live: InflightRequest, route: Route, is_moved: bool) -> None:
        """Count a migration, and give back the place that is not needed."""
        self.num_committed += is_moved
        self.num_failed += not is_moved
        if not is_moved:
            live.migrate_after_s = time.monotonic() + RETRY_S
        spawn_into(self._tasks, self._give_back(route, is_moved))

    def _begin(self, answers: Iterable[InflightRequest], draining: frozenset[WorkerId]) -> None:
        answers = list(answers)
        num_left = MAX_AT_ONCE - sum(live.migration is not None or live.is_migration_placed for live in answers)
        for live in answers:
            source = live.source(time.monotonic()) if num_left > 0 else None
            if source is not None and source.worker_id in draining:
                num_left -= 1
                live.is_migration_placed = True
                spawn_into(self._tasks, self._migrate(live, source, draining))

    async def _migrate(self, live: InflightRequest, source: WorkerRef, draining: frozenset[WorkerId]) -> None:
        """Take a place elsewhere and send the jobs; events decide what becomes of it."""
        try:
            route = await self._place(live, source, draining)
        finally:
            live.is_migration_placed = False
        if route is None:
            return
        if not live.on_migration_placed(route):
            await self._give_back(route, is_moved=False)
            return
        job, error = live.migration_job(self._gateway_id, time.monotonic()), None
        asyncio.get_running_loop().call_later(TIMEOUT_S, self._give_up, live, route)
        log.debug("%s moves from %s to %s", live.request_id, source.worker_id, route.decode.worker_id)
        for sent in await asyncio.gather(
            *(self._workers.send(ref, job) for ref in (route.prefill, route.decode)), return_exceptions=True
        ):
            if isinstance(sent, BaseException):
                error = sent if isinstance(sent, TandemError) else TandemError("a job could not be sent")
        self._perform(live, live.on_migration_sent(route, error))

    async def _place(self, live: InflightRequest, source: WorkerRef, draining: frozenset[WorkerId]) -> Route | None:
        num_left = live.answer.request.sampling.max_tokens - live.answer.num_tokens
        need_tokens = decode_need(len(live.answer.all_token_ids), num_left)
        exclude = [*draining, *self._workers.strange, *self._workers.silent]
        try:
            return await self._store.place_migration(live.request_id, live.take_epoch(), source, need_tokens, exclude)
        except TandemError as error:
            log.info("%s stays on %s, which drains: %s", live.request_id, source.worker_id, error)
            live.migrate_after_s = time.monotonic() + RETRY_S
            return None

    def _give_up(self, live: InflightRequest, route: Route) -> None:
        if live.migration is route:
            self._perform(live, live.give_up_migration(f"it was not decided within {TIMEOUT_S:g} s"))

    async def _give_back(self, route: Route, is_moved: bool) -> None:
        try:
            await self._store.end_migration(route.request_id, route.epoch, is_moved)
        except TandemError as error:
            log.info("end of migration %d of %s not told to the store: %s", route.epoch, route.request_id, error)
