"""The migration of running answers to other workers, as the policy orders it."""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from contracts.errors import TandemError
from contracts.ids import Epoch, GatewayId, RequestId
from contracts.node import Node
from contracts.request import Route, WorkerRef
from coordinator.migration_policy import MigrationOrder, MigrationPlanner, MigrationReason
from coordinator.placement.policy import decode_need
from gateway.dispatch.registry_client import Placement
from gateway.dispatch.request_actions import Action
from gateway.dispatch.request_state_machine import InflightRequest
from gateway.dispatch.worker_pool import WorkerPool
from service.tasks import spawn_into

log = logging.getLogger(__name__)

LOOK_PERIOD_S = 0.1
MAX_AT_ONCE, MAX_TOKENS_AT_ONCE = 64, 131_072
"""Migrations of one gateway at once, and the KV that they move: it is held at two workers and shares the links with
handoffs. Each waits for some steps of both, so a drain of many short answers needs many at once.
"""
TIMEOUT_S = 15.0
"""The seconds after which a migration that is not decided is given up; a source gives up sooner."""
RETRY_S = 1.0
"""How long an answer waits that could not move, before it is tried again."""

Perform = Callable[[InflightRequest, Sequence[Action]], None]


class Migrations:
    """Owned by the event loop. `perform`: does what has become of an answer.

    `counts`: by outcome and reason.
    """

    def __init__(
        self,
        store: Placement,
        gateway_id: GatewayId,
        workers: WorkerPool,
        perform: Perform,
        planner: MigrationPlanner,
        rng: random.Random | None = None,
    ) -> None:
        self._store, self._gateway_id, self._workers, self._perform = store, gateway_id, workers, perform
        self._planner, self._rng = planner, rng or random.Random()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reasons: dict[tuple[RequestId, Epoch], MigrationReason] = {}
        self.counts: Counter[tuple[str, MigrationReason]] = Counter()

    async def run(self, live: Callable[[], Iterable[InflightRequest]]) -> None:
        """Move what is to move, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            nodes = [Node(info=info, load=load, alive=True) for info, load in self._workers.loads]
            if orders := self._planner.decide(nodes, time.monotonic()):
                self._begin(list(live()), orders)

    async def stop(self) -> None:
        """Begin nothing more, and wait for what was begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def ended(self, live: InflightRequest, route: Route, is_moved: bool) -> None:
        """Count a migration, and give back the place that is not needed."""
        reason = self._reasons.pop((route.request_id, route.epoch))
        self.counts["committed" if is_moved else "failed", reason] += 1
        if not is_moved:
            live.migrate_after_s = time.monotonic() + RETRY_S
        spawn_into(self._tasks, self._give_back(route, is_moved))

    def _begin(self, answers: list[InflightRequest], orders: Sequence[MigrationOrder]) -> None:
        moving = [live for live in answers if live.migration is not None or live.is_migration_placed]
        num_left, tokens_left = MAX_AT_ONCE - len(moving), MAX_TOKENS_AT_ONCE - sum(map(_num_tokens, moving))
        now = time.monotonic()
        for order in orders:
            ready = [(live, ref) for live in answers if (ref := live.source(now)) and ref.worker_id == order.source]
            # The youngest first: they have the most before them, and the least to be copied.
            ready.sort(key=lambda each: (each[0].answer.num_tokens, _num_tokens(each[0])))
            for live, ref in ready[: self._num_moved(order, len(ready))]:
                if num_left <= 0 or tokens_left <= 0:
                    return
                live.is_migration_placed = True
                spawn_into(self._tasks, self._migrate(live, ref, order))
                num_left, tokens_left = num_left - 1, tokens_left - _num_tokens(live)

    def _num_moved(self, order: MigrationOrder, num_ready: int) -> int:
        """Return how many of our answers are to move.

        A fraction counts by chance, so that gateways of few answers have their part.
        """
        return min(num_ready, int(order.share * num_ready + self._rng.random()))

    async def _migrate(self, live: InflightRequest, source: WorkerRef, order: MigrationOrder) -> None:
        """Take a place elsewhere and send the jobs; events decide what becomes of it."""
        try:
            route = await self._place(live, source, order)
        finally:
            live.is_migration_placed = False
        if route is None:
            return
        if not live.on_migration_placed(route):
            await self._give_back(route, is_moved=False)
            return
        self._reasons[route.request_id, route.epoch] = order.reason
        job, error = live.migration_job(self._gateway_id, time.monotonic()), None
        asyncio.get_running_loop().call_later(TIMEOUT_S, self._give_up, live, route)
        log.debug("%s moves from %s to %s", live.request_id, source.worker_id, route.decode.worker_id)
        for sent in await asyncio.gather(
            *(self._workers.send(ref, job) for ref in (route.prefill, route.decode)), return_exceptions=True
        ):
            if isinstance(sent, BaseException):
                error = sent if isinstance(sent, TandemError) else TandemError("a job could not be sent")
        self._perform(live, live.on_migration_sent(route, error))

    async def _place(self, live: InflightRequest, source: WorkerRef, order: MigrationOrder) -> Route | None:
        num_left = live.answer.request.sampling.max_tokens - live.answer.num_tokens
        need_tokens = decode_need(len(live.answer.all_token_ids), num_left)
        try:
            lacking = self._workers.lacking(live.answer.request.adapter)
            exclude = [*order.exclude, *self._workers.strange, *self._workers.silent, *lacking]
            return await self._store.place_migration(live.request_id, live.take_epoch(), source, need_tokens, exclude)
        except TandemError as error:
            log.info("%s stays on %s (%s): %s", live.request_id, source.worker_id, order.reason, error)
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


def _num_tokens(live: InflightRequest) -> int:
    """Return how many tokens of KV an answer has."""
    return len(live.answer.request.token_ids) + live.answer.num_tokens
