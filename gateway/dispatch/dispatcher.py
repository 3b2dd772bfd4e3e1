"""Places answers, sends their jobs, hands them their events, and ends each exactly once."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from contracts.errors import Overloaded, RequestError, TandemError, Unavailable
from contracts.events import Event, Failed, Tokens
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.request import Cancel, JobMessage, Route, WorkerRef, chain_start
from coordinator.migration_policy import DEFAULT_REASONS, MigrationPlanner, MigrationPolicy
from coordinator.request_states import RequestState
from gateway.dispatch.attempt_budget import AttemptBudget
from gateway.dispatch.client_error_messages import for_clients
from gateway.dispatch.migrations import Migrations
from gateway.dispatch.registry_client import Placement, PlaceUnknown
from gateway.dispatch.request_actions import (
    Action,
    AwaitDecode,
    CancelAttempt,
    Deliver,
    EndMigration,
    Finish,
    LeavePlace,
    PlaceAgain,
    ReturnPlace,
    SendJobs,
)
from gateway.dispatch.request_state_machine import InflightRequest, OnDelta
from gateway.dispatch.worker_pool import WorkerPool
from gateway.generation.generation_state import GenerationState
from service.outage_log import OutageLog
from service.tasks import spawn_into

log = logging.getLogger(__name__)

REPLAY_PERIOD_S = 0.25
RENEW_PERIOD_S = 1.0
LOOK_S = 1.0
"""How long decode may take to tell a token once prefill was lost behind its own is seen in so many looks, each behind
so many seconds: see WorkerLink.
"""
MAX_STALE_EVENTS = 4096

T = TypeVar("T")


class Dispatcher:
    """Owned by the event loop."""

    def __init__(
        self,
        store: Placement,
        gateway_id: GatewayId,
        secret: str,
        model: str,
        planner: MigrationPlanner | None = None,
    ) -> None:
        self._store, self._gateway_id = store, gateway_id
        self._live: dict[RequestId, InflightRequest] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._migrating: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._unknown: set[RequestId] = set()  # the store may have placed them, and its answer was lost
        # Cancelled once more already; the oldest first.
        self._stale_events: dict[tuple[WorkerId, RequestId, Epoch], None] = {}
        self.num_unknown = self.num_stale = self.num_duplicates = self.num_cancels = self.num_losses = 0
        self.num_replays = 0
        self.workers = WorkerPool(store, gateway_id, secret, model, self._on_event, self._on_lost)
        planner = planner or MigrationPolicy(DEFAULT_REASONS)
        self.migrations = Migrations(store, gateway_id, self.workers, self._perform, planner)

    async def start(self) -> None:
        """Raises Unavailable if the registry can't be reached."""
        await self.workers.start()
        self._renewing = asyncio.create_task(self._renew())
        self._migrating = asyncio.create_task(self.migrations.run(self._live.values))

    async def stop(self) -> None:
        """Ends what runs, and waits for its cancels to be sent."""
        self._is_stopping = True
        for live in list(self._live.values()):
            self._perform(live, live.fail(Unavailable("the gateway shuts down")))
        periodic = [task for task in (self._renewing, self._migrating) if task is not None]
        for task in periodic:
            task.cancel()
        await asyncio.gather(*periodic, return_exceptions=True)
        await self.migrations.stop()
        # The end of one may begin another: a refused job is cancelled. Those done are passed over: to await nothing but
        # them gives the loop no turn (Python 3.12 and later), and so they would never leave the set.
        while running := [task for task in self._tasks if not task.done()]:
            await asyncio.gather(*running, return_exceptions=True)
        await self.workers.stop()

    @property
    def num_inflight(self) -> int:
        return len(self._live)

    def adapters_in_flight(self) -> tuple[list[str], list[str]]:
        """Return the names of LoRA adapters by their answers: those whose first token came, and the others."""
        named = [(live.answer.request.adapter, live.answer.num_tokens > 0) for live in self._live.values()]
        running, waiting = (
            sorted({ref.name for ref, is_running in named if ref is not None and is_running is wanted})
            for wanted in (True, False)
        )
        return running, waiting

    @property
    def num_answering(self) -> int:
        """Those in flight whose first token came."""
        return sum(live.answer.num_tokens > 0 for live in self._live.values())

    async def begin(self, request_id: RequestId, answer: GenerationState, on_piece: OnDelta, deadline_s: float) -> None:
        """From here on, exactly one piece with `finish` or `failed` follows, unless cancelled.

        Raises Overloaded or Unavailable. It may be called again then; who does not, cancels.
        """
        if self._is_stopping:
            raise Unavailable("the gateway shuts down")
        try:
            route = await self._placed(request_id, Epoch(1), answer, self._excluded(is_begun=False))
        except PlaceUnknown:
            self._unknown.add(request_id)
            raise
        self._unknown.discard(request_id)
        if self._is_stopping:  # since it was asked for
            self._spawn(self._finish(request_id, route.epoch, RequestState.FAILED))
            raise Unavailable("the gateway shuts down")
        tries = AttemptBudget(self._lives)
        live = self._live[request_id] = InflightRequest(request_id, answer, on_piece, deadline_s, route, tries)
        answer.sequencer.epoch = route.epoch
        self._spawn(self._send(live))

    def cancel(self, request_id: RequestId, reason: str, end: RequestState = RequestState.CANCELLED) -> None:
        """Frees both workers. Unknown or ended requests are fine; no piece follows."""
        live = self._live.get(request_id)
        if live is not None:
            live.answer.ended = True
            self._close(live, reason, end)
        elif request_id in self._unknown:
            self._unknown.discard(request_id)
            self._spawn(self._finish(request_id, Epoch(1), end))

    async def _placed(
        self, request_id: RequestId, epoch: Epoch, answer: GenerationState, exclude: Sequence[WorkerId]
    ) -> Route:
        """A caller that gives up meanwhile leaves no place behind."""
        placing = self._spawn(self._place(request_id, epoch, answer, exclude))
        try:
            return await asyncio.shield(placing)
        except asyncio.CancelledError:
            self._spawn(self._undo(request_id, epoch, placing))
            raise

    async def _undo(self, request_id: RequestId, epoch: Epoch, placing: asyncio.Task[Route]) -> None:
        try:
            await placing
        except PlaceUnknown:
            await self._finish(request_id, epoch, RequestState.CANCELLED)
        except TandemError as error:
            log.info("%s was given up before it had a place: %s", request_id, error)
        else:
            await self._finish(request_id, epoch, RequestState.CANCELLED)

    async def _place(
        self, request_id: RequestId, epoch: Epoch, answer: GenerationState, exclude: Sequence[WorkerId]
    ) -> Route:
        ask, token_ids = answer.request, answer.all_token_ids
        left = ask.sampling.max_tokens - answer.num_tokens
        lacking = self.workers.lacking(ask.adapter)
        start = chain_start(ask.cache_salt, ask.adapter)
        room = ask.room if epoch == 1 else 1.0  # what has begun is no new request when it is placed again
        route = await self._store.place(request_id, epoch, token_ids, left, [*exclude, *lacking], start, room)
        log.debug(
            "%s is placed: prompt of %d tokens on %s, answer on %s (attempt %d)",
            request_id, len(token_ids), route.prefill.worker_id, route.decode.worker_id, route.epoch,
        )  # fmt: skip
        return route

    def _perform(self, live: InflightRequest, actions: Sequence[Action]) -> None:
        """Do what has become of an answer."""
        for action in actions:
            match action:
                case Deliver(delta):
                    live.on_delta(delta)
                case LeavePlace():
                    self._spawn(self._leave(live, action))
                case PlaceAgain():
                    self.num_replays += action.is_replay
                    self._spawn(self._place_again(live, action))
                case SendJobs():
                    self._spawn(self._send(live))
                case CancelAttempt(workers, cancel):
                    self._send_cancels(workers, cancel)
                case AwaitDecode(route, num_looks):
                    self._await_decode(live, route, num_looks)
                case EndMigration(route, is_moved):
                    self.migrations.ended(live, route, is_moved)
                case ReturnPlace(epoch, end):
                    self._spawn(self._finish(live.request_id, epoch, end))
                case Finish(reason, end):
                    self._close(live, reason, end)

    async def _send(self, live: InflightRequest) -> None:
        """Send its jobs to prefill and decode at once."""
        route, workers, job = live.route, live.workers, live.job(self._gateway_id, time.monotonic())
        live.answer.servers = {"prefill": route.prefill.worker_id, "decode": route.decode.worker_id}
        sent = await asyncio.gather(*(self.workers.send(ref, job) for ref in workers), return_exceptions=True)
        refusals = {ref.worker_id: error for ref, error in zip(workers, sent, strict=True) if error is not None}
        ours = [error for error in refusals.values() if not isinstance(error, TandemError)]
        told = {name: error for name, error in refusals.items() if isinstance(error, TandemError)}
        told |= {name: Unavailable("the job could not be sent") for name in refusals.keys() - told.keys()}
        self._perform(live, live.on_sent(route, time.monotonic(), told))
        if ours:
            raise ours[0]

    async def _leave(self, live: InflightRequest, place: LeavePlace) -> None:
        """Let what was read in the same turn be told first."""
        self._perform(live, live.on_left(place, time.monotonic()))

    async def _place_again(self, live: InflightRequest, left: PlaceAgain) -> None:
        try:
            if left.waits:
                await asyncio.sleep(REPLAY_PERIOD_S)
            route = await self._place_found(live)
        except TandemError as error:
            self._perform(live, live.on_unplaced(error, left.error))
        else:
            self._perform(live, live.on_placed(route))

    async def _place_found(self, live: InflightRequest) -> Route:
        """Return a place.

        What was shown in part waits for one, and then takes workers, too, that were lost and are there again; what was
        not, takes those again that a handoff did not reach.
        """
        while True:
            exclude = [*live.tries.refusers, *self._excluded(live.is_begun)]
            try:
                return await self._placed(live.request_id, live.epoch, live.answer, exclude)
            except TandemError:  # who takes as many tokens may be the one that is to come again
                if not live.may_look_on(time.monotonic()):
                    raise
            live.look_on()
            await asyncio.sleep(REPLAY_PERIOD_S)
            if live.end is not None:
                raise Unavailable("it ended while it had no place")

    def _lives(self, ref: WorkerRef) -> bool:
        """Return whether this worker is the one that it was, and not its successor."""
        return self.workers.ref(ref.worker_id) == ref

    def _excluded(self, is_begun: bool) -> list[WorkerId]:
        """Return the workers that are not to be asked.

        If none speaks, the gateway itself was deaf: what was not begun goes to them.
        """
        silent = self.workers.silent if is_begun or self.workers.can_serve() else []
        return [*self.workers.strange, *silent]

    def _on_event(self, worker_id: WorkerId, event: Event) -> None:
        live = self._live.get(event.request_id)
        if live is None:
            self.num_unknown += 1
            self._on_stray(worker_id, event, "unknown at its gateway")
            return
        if isinstance(event, Failed):
            level = logging.INFO if event.code in (Overloaded.code, RequestError.code) else logging.WARNING
            log.log(level, "%s failed on %s: %s: %s", event.request_id, worker_id, event.code, event.message)
            event = for_clients(event)
        # A source whose migration was given up keeps the answer, and is told so by the answer itself.
        is_given_up = live.has_given_up(event.epoch) and not isinstance(event, Failed)
        if event.epoch < live.epoch or is_given_up:
            self._on_stray(worker_id, event, "placed again")
        try:
            actions = live.on_event(worker_id, event, time.monotonic())
        except Exception:  # of one answer's tokens; the others of this worker go on
            log.exception("request %s", event.request_id)
            actions = live.fail(TandemError("the answer's tokens could not be made text"))
        self._perform(live, actions)

    def _on_stray(self, worker_id: WorkerId, event: Event, reason: str) -> None:
        """Send one more cancel to a worker that still tells tokens of what has ended, or went elsewhere.

        Tokens are on their way for a moment, or for ever: a cancel can be lost, or come before its job. A source in
        doubt says that a migration has failed until it is told what became of it, and so is answered each time.
        """
        key = (worker_id, event.request_id, event.epoch)
        is_answered = isinstance(event, Tokens) and key in self._stale_events
        if not isinstance(event, Tokens | Failed) or is_answered or self._is_stopping:
            return
        if isinstance(event, Tokens):
            self._stale_events[key] = None
            if len(self._stale_events) > MAX_STALE_EVENTS:
                del self._stale_events[next(iter(self._stale_events))]
        if ref := self.workers.ref(worker_id):
            self._spawn(self._send_cancel(ref, Cancel(event.request_id, event.epoch, reason)))

    def _on_lost(self, worker_id: WorkerId, incarnation: Incarnation, reason: str) -> None:
        lost = [live for live in self._live.values() if live.needs(worker_id, incarnation)]
        self.num_losses += bool(lost)
        for live in lost:
            self._perform(live, live.on_lost(worker_id))

    def _await_decode(self, live: InflightRequest, route: Route, num_looks: int) -> None:
        """Looks are counted, not seconds: a gateway that was paused has not read what decode told meanwhile."""
        if num_looks:
            then = live, route, num_looks - 1
            asyncio.get_running_loop().call_later(LOOK_S, self._await_decode, *then)
        else:
            self._move_undecoded(live, route)

    def _move_undecoded(self, live: InflightRequest, route: Route) -> None:
        self._perform(live, live.on_undecoded(route))

    def _close(self, live: InflightRequest, reason: str, end: RequestState) -> None:
        """Once per request: out of the table, cancelled where it may still run, and told to the store."""
        if self._live.pop(live.request_id, None) is None:
            return
        self._perform(live, live.give_up_migration("the request has ended"))
        live.end = end
        sequencer = live.answer.sequencer
        self.num_stale += sequencer.num_stale
        self.num_duplicates += sequencer.num_duplicates
        if reason:
            self._send_cancels(live.workers, Cancel(live.request_id, live.route.epoch, reason))
        if live.left:
            self._send_cancels(list(live.left), Cancel(live.request_id, live.route.epoch, "the answer has moved"))
        # Not the route's epoch: while it is placed again, the claim may be taken, and its answer lost.
        self._spawn(self._finish(live.request_id, live.epoch, end))

    def _send_cancels(self, workers: list[WorkerRef], cancel: JobMessage) -> None:
        self.num_cancels += 1
        for ref in workers:
            self._spawn(self._send_cancel(ref, cancel))

    async def _send_cancel(self, ref: WorkerRef, cancel: JobMessage) -> None:
        try:
            await self.workers.send(ref, cancel)
        except TandemError as error:
            log.info("%s not cancelled on %s: %s", cancel.request_id, ref.worker_id, error)

    async def _finish(self, request_id: RequestId, epoch: Epoch, end: RequestState) -> None:
        try:
            await self._store.finish(request_id, epoch, end)
        except TandemError as error:
            log.warning("end of %s not told to the store, its lease will end it: %s", request_id, error)

    async def _renew(self) -> None:
        outage = OutageLog(log, "leases are renewed again")
        while True:
            await asyncio.sleep(RENEW_PERIOD_S)
            if self._live:
                try:
                    await self._store.renew(list(self._live))
                except Unavailable as error:
                    outage.failed(f"leases not renewed: {error}", error.what)
                else:
                    outage.worked()

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """What `stop` waits for."""
        return spawn_into(self._tasks, coroutine)
