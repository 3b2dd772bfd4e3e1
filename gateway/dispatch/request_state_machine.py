"""An answer in progress as a state machine: what happens goes in, actions to perform come out.

It knows no clock, task or socket: `now` is an argument, in seconds of the monotonic clock. See Dispatcher, which
performs the actions.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from contracts.errors import AdapterMissing, Overloaded, TandemError, Unavailable, by_code
from contracts.events import Event, Failed, Finished, FinishReason, Moved, Tokens
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.request import Cancel, CancelMigration, Job, Route, WorkerRef
from coordinator.request_states import RequestState
from gateway.dispatch.attempt_budget import HANDOFF_FAULTS, AttemptBudget
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
    migration_cancels,
)
from gateway.generation.generation_state import GenerationState, OutputDelta

COMMIT_LOOKS, MIGRATION_LOOKS = 5, 2
"""In how many looks it is seen whether the receiver of KV goes on whose sender was lost, see AwaitDecode. All of an
answer that moves is there already, or not."""

OnDelta = Callable[[OutputDelta], None]


@dataclass
class InflightRequest:
    """An answer in progress: where it runs, and who reads it. `end` once it has ended.

    `tries`: those that it may still have. `decoder`: the worker that told a token after the first of this attempt.
    Once that came, too, no other is needed any more.
    `is_orphaned`: who sends its KV was lost, prefill after its token or the source of a migration; the receiver has it
    all, or the answer goes on elsewhere.
    `migration`: from where to where it moves now, under the epoch of the route; until that is decided, what its source
    tells counts. `has_moved`: since this attempt began. `left`: from where, of those that have not said yet that they
    know; they keep it paused until they are told. `newest_epoch`: the latest that a migration had.
    `is_migration_placed`: a place for one is being asked for. `migrate_after_s`: when the next one may be tried.
    """

    request_id: RequestId
    answer: GenerationState
    on_delta: OnDelta
    deadline_s: float
    route: Route
    tries: AttemptBudget
    is_moving: bool = False
    decoder: WorkerId | None = None
    is_orphaned: bool = False
    migration: Route | None = None
    has_moved: bool = False
    left: tuple[WorkerRef, ...] = ()
    newest_epoch: int = 0
    is_migration_placed: bool = False
    migrate_after_s: float = 0.0
    end: RequestState | None = None

    @property
    def workers(self) -> list[WorkerRef]:
        return _workers_of(self.route)

    @property
    def is_begun(self) -> bool:
        return self.answer.sequencer.has_begun

    @property
    def epoch(self) -> Epoch:
        return self.answer.sequencer.epoch

    def on_event(self, worker_id: WorkerId, event: Event, now: float) -> list[Action]:
        """Take what a worker tells of this answer. Raises whatever its tokens can't be read for."""
        former = [ref for ref in self.left if ref.worker_id == worker_id]
        if former and isinstance(event, Failed) and event.epoch == self.epoch:
            # It does not know that the destination has the answer.
            return [CancelAttempt(former, Cancel(self.request_id, event.epoch, "the answer has moved"))]
        if isinstance(event, Moved):
            self.left = tuple(ref for ref in self.left if ref not in former)
        actions = self._on_migration(worker_id, event)
        if isinstance(event, Moved):
            return actions
        return [*actions, *self._on_attempt(worker_id, event, now)]

    def _on_attempt(self, worker_id: WorkerId, event: Event, now: float) -> list[Action]:
        sequencer = self.answer.sequencer
        is_current = event.epoch == sequencer.epoch
        if is_current and (faults := self._faults(worker_id, event)):
            if self.is_moving:
                return []
            self.tries.note_handoff_fault(faults, self.workers, now, self.deadline_s)
            return self._leave(faults)
        if (
            is_current
            and self.decoder != worker_id
            and isinstance(event, Tokens)
            and any(token.index > sequencer.first_index for token in event.tokens)
        ):
            self.decoder, self.is_orphaned = worker_id, False
        actions = self._delivered(self.answer.feed(event))
        if is_current and isinstance(event, Finished) and worker_id != self.route.decode.worker_id:
            # Prefill tells it, too, if their link lives so long.
            cancel = Cancel(self.request_id, event.epoch, "answered without decode")
            actions.append(CancelAttempt([self.route.decode], cancel))
        return actions

    def on_lost(self, worker_id: WorkerId) -> list[Action]:
        """Go on without a worker that this answer needs (see `needs`), or leave its place."""
        is_destination = self.migration is not None and self.migration.decode.worker_id == worker_id
        actions = self.give_up_migration("its destination was lost") if is_destination else []
        if self.is_moving or not self._ends_with(worker_id):
            return actions
        if self.migration is not None and self.migration.prefill.worker_id == worker_id:
            # The destination may have it all. It tells a token then, and else that it has failed.
            self.is_orphaned = True
            return [*actions, AwaitDecode(self.migration, MIGRATION_LOOKS)]
        if self._may_go_on_without(worker_id):
            self.is_orphaned = True
            return [*actions, AwaitDecode(self.route, COMMIT_LOOKS)]
        return [*actions, *self._leave({worker_id: _lost()})]

    def on_undecoded(self, route: Route) -> list[Action]:
        """Leave `route`, whose prefill was lost behind its token, unless decode goes on by now.

        A prefill worker that is heard again and decodes by itself may have told tokens that nobody heard. So may the
        source of a migration.
        """
        if self.migration is route:
            return self.give_up_migration("its source was lost")
        is_here = self.end is None and self.route is route and not self.is_moving
        if not is_here or self.decoder == route.decode.worker_id:
            return []
        return self._leave({route.prefill.worker_id: _lost()})

    def on_sent(self, route: Route, now: float, refusals: Mapping[WorkerId, TandemError]) -> list[Action]:
        """Take what became of the jobs of `route`. Cancels may have overtaken them; decode's own end has not."""
        if self.end is None and not self.is_moving and self.route is route:
            return self.on_refused(refusals, now) if refusals else []
        is_answered = self.route is route and self.answer.sequencer.ended and self.decoder == route.decode.worker_id
        cancel = Cancel(self.request_id, route.epoch, "ended before it began")
        return [] if is_answered else [CancelAttempt(_workers_of(route), cancel)]

    def on_refused(self, refusals: Mapping[WorkerId, TandemError], now: float) -> list[Action]:
        """Leave a place whose workers did not take their jobs, of which nothing came."""
        return self.on_left(LeavePlace(refusals, is_lost=False), now)

    def on_left(self, place: LeavePlace, now: float) -> list[Action]:
        """Go on without those that failed, behind what was shown; or end, if it may not go on."""
        if self.end is not None:
            return []
        if (reason := self.answer.known_end) is not None:
            return self._finish_unheard(reason)
        error = next(iter(place.faults.values()))
        is_replay = self.tries.count_replay(self.is_begun, self.answer.sequencer.has_first, place.is_lost, now)
        if not self.tries.may_move(self.is_begun, now) and not self.tries.may_retry(self.is_begun, now):
            return self.fail(error)
        self.tries.num_attempts += 1
        self.tries.refusers += place.faults
        given_up = self.give_up_migration("placed again")
        left = CancelAttempt([*self.workers, *self.left], Cancel(self.request_id, self.route.epoch, "placed again"))
        waits = self.is_begun and not self.answer.sequencer.has_first
        self.answer.restart(Epoch(max(self.route.epoch, self.newest_epoch) + 1))
        self.decoder, self.is_orphaned, self.is_moving = None, False, True
        self.has_moved, self.left = False, ()
        return [*given_up, left, PlaceAgain(error, waits, is_replay)]

    def on_placed(self, route: Route) -> list[Action]:
        """Go on at `route`; what ended while it had no place does not need the new one."""
        self.is_moving, self.route = False, route
        return [SendJobs()] if self.end is None else [ReturnPlace(route.epoch, self.end)]

    def on_unplaced(self, error: TandemError, left: TandemError) -> list[Action]:
        """End: there is no place. The client hears of a full pool, or else of why the old place was `left`."""
        self.is_moving = False
        return self.fail(error if isinstance(error, Overloaded) else left)

    def may_look_on(self, now: float) -> bool:
        """Return whether it may ask for a place once more that it did not get."""
        may = self.tries.may_move if self.is_begun else self.tries.may_retry
        return may(self.is_begun, now)

    def look_on(self) -> None:
        """Ask anew, those too that refused.

        Each try is an attempt: a place that was given, and the answer lost, is not the next one's.
        """
        self.tries.refusers.clear()
        self.answer.sequencer.epoch = Epoch(self.epoch + 1)

    def fail(self, error: TandemError) -> list[Action]:
        """End with `error`, unless it has ended."""
        return self._delivered(self.answer.fail(error))

    def needs(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        """Return whether this answer ends with that worker.

        It does not with one whose part is done, nor with one that it goes on without.
        """
        destinations = [] if self.migration is None else [self.migration.decode]
        named = [ref for ref in (*self.workers, *destinations) if ref.worker_id == worker_id]
        if self.is_moving or not any(ref.incarnation == incarnation for ref in named):
            return False
        return bool(destinations and named[-1] in destinations) or self._ends_with(worker_id)

    def source(self, now: float) -> WorkerRef | None:
        """Return the worker that decodes this answer, if it may be moved from there now."""
        is_busy = self.is_moving or self.is_orphaned or self.is_migration_placed
        is_settled = self.end is None and self.migration is None and not is_busy
        goes_on = self.answer.sequencer.has_first and self.answer.known_end is None
        if not (is_settled and goes_on and now >= self.migrate_after_s):
            return None
        return next((ref for ref in self.workers if ref.worker_id == self.decoder), None)

    def has_given_up(self, epoch: Epoch) -> bool:
        """Return whether that was the epoch of a migration that was given up."""
        is_expected = self.migration is not None and self.migration.epoch == epoch
        return self.epoch < epoch <= self.newest_epoch and not is_expected

    def take_epoch(self) -> Epoch:
        """Return the epoch of the next migration. An attempt that begins meanwhile has a later one."""
        self.newest_epoch = max(self.epoch, self.newest_epoch) + 1
        return Epoch(self.newest_epoch)

    def on_migration_placed(self, route: Route) -> bool:
        """Begin to move, and return whether the answer still is where the migration begins."""
        source = self.source(math.inf)
        if source != route.prefill or route.epoch != self.newest_epoch or route.epoch <= self.epoch:
            return False
        self.migration = route
        return True

    def on_migration_sent(self, route: Route, error: TandemError | None) -> list[Action]:
        """Take what became of the jobs of a migration. What ended it meanwhile may have overtaken them."""
        if self.migration is route:
            return [] if error is None else self.give_up_migration(f"its jobs were not taken: {error}")
        if self.route.epoch == route.epoch:  # it has moved already
            return []
        return migration_cancels(route, "given up before it began")

    def give_up_migration(self, reason: str) -> list[Action]:
        """Go on at the source, unless the answer does not move; should it have left there, the source says so.

        If the source was lost, the answer is left.
        """
        route, self.migration = self.migration, None
        if route is None:
            return []
        actions = [*migration_cancels(route, reason), EndMigration(route, is_moved=False)]
        if self.is_moving or not self.is_orphaned:
            return actions
        return [*actions, *self._leave({route.prefill.worker_id: _lost()})]

    def migration_job(self, gateway_id: GatewayId, now: float) -> Job:
        """Return the job of the current migration, for both of its workers."""
        assert self.migration is not None
        return replace(self.job(gateway_id, now), route=self.migration, is_migration=True)

    def job(self, gateway_id: GatewayId, now: float) -> Job:
        """Return the prompt, and what was answered to it.

        Another worker goes on behind that, under the same draws.
        """
        ask, sampling = self.answer.request, self.answer.request.sampling
        if self.is_begun:  # and so the prompt's log-probabilities are here
            sampling = replace(sampling, prompt_logprobs=None)
        left_s = max(self.deadline_s - now, 0.001)
        return Job(
            route=self.route,
            gateway_id=gateway_id,
            token_ids=self.answer.all_token_ids,
            sampling=sampling,
            timeout_s=left_s,
            priority=ask.priority,
            cache_salt=ask.cache_salt,
            num_answered=self.answer.num_tokens,
            tenant=ask.tenant,
            weight=ask.weight,
            adapter=ask.adapter,
        )

    def _on_migration(self, worker_id: WorkerId, event: Event) -> list[Action]:
        """Take what decides where an answer that moves goes on.

        The destination's first token says that it does there, as Moved does from the source, whichever is read first.
        """
        route, is_own = self.migration, event.epoch == self.epoch
        has_left = is_own and isinstance(event, Moved)
        if self.is_moving:
            return []
        if route is None:
            if has_left:  # before it was told to keep the answer
                return self._leave({worker_id: _lost()})
            in_doubt = isinstance(event, Failed) and event.epoch > self.epoch
            sources = [ref for ref in self.workers if ref.worker_id == worker_id] if in_doubt else []
            cancel = CancelMigration(self.request_id, event.epoch, "the answer goes on at its source")
            return [CancelAttempt(sources, cancel)] if sources else []
        if has_left or (event.epoch == route.epoch and not isinstance(event, Failed)):
            return self._go_on_at_destination(route, former=() if has_left else (route.prefill,))
        if event.epoch == route.epoch and isinstance(event, Failed):
            return self.give_up_migration(event.message)
        return []

    def _go_on_at_destination(self, route: Route, former: tuple[WorkerRef, ...]) -> list[Action]:
        """Count it from now on as of the destination; `former`: the source, unless it has told of it."""
        self.answer.migrate(route.epoch)
        here = route.decode
        self.route, self.migration, self.has_moved = Route(self.request_id, route.epoch, here, here), None, True
        self.left = (*(ref for ref in self.left if ref != here), *former)
        self.decoder, self.is_orphaned = here.worker_id, False
        self.answer.servers = {"prefill": here.worker_id, "decode": here.worker_id}
        return [EndMigration(route, is_moved=True)]

    def _ends_with(self, worker_id: WorkerId) -> bool:
        """Return whether this attempt needs that worker still."""
        is_here = any(ref.worker_id == worker_id for ref in self.workers)
        is_done = self.decoder not in (None, worker_id) and self.answer.sequencer.has_first
        is_receiver = self.migration is None and worker_id == self.route.decode.worker_id
        is_given_up = self.is_orphaned and not is_receiver
        return is_here and not is_done and not is_given_up

    def _leave(self, faults: Mapping[WorkerId, TandemError]) -> list[Action]:
        """Leave this attempt: its other losses and refusals no longer count, what it tells until then does."""
        self.is_moving = True
        return [LeavePlace(faults, is_lost=all(fault.code != Overloaded.code for fault in faults.values()))]

    def _finish_unheard(self, reason: FinishReason) -> list[Action]:
        """End: all of its tokens came; who was to say so was lost, whatever it said before."""
        sequencer = self.answer.sequencer
        self.answer.restart(Epoch(sequencer.epoch + 1))
        end = Finished(self.request_id, sequencer.epoch, sequencer.next_index, reason, {})
        return self._delivered(self.answer.feed(end))

    def _delivered(self, delta: OutputDelta | None) -> list[Action]:
        if delta is None:
            return []
        if delta.failed is not None:
            return [Finish(f"failed: {delta.failed.code}", RequestState.FAILED), Deliver(delta)]
        if delta.finish is not None:
            # Ended by the worker: nothing to free there. Ended by a stop string: the workers do not know yet.
            reason = "" if self.answer.sequencer.ended else "stop string"
            return [Finish(reason, RequestState.FINISHED), Deliver(delta)]
        return [Deliver(delta)]

    def _faults(self, teller: WorkerId, event: Event) -> dict[WorkerId, TandemError]:
        """Return without which workers it is to go on elsewhere, and why; none if it stays, or ends."""
        match event:
            case Failed(code=Overloaded.code) if self.is_begun:
                return {teller: by_code(event.code, event.message)}
            case Failed(code=AdapterMissing.code):
                return {teller: by_code(event.code, event.message)}
            case Failed() if event.code in HANDOFF_FAULTS:
                # The teller knows of a dead peer before the registry does. One that has none ends the answer.
                others = [ref.worker_id for ref in self.workers if ref.worker_id != teller]
                if self.has_moved:  # the destination took the answer, and can't go on with it
                    others = [teller]
                return dict.fromkeys(others, by_code(event.code, event.message))
        return {}

    def _may_go_on_without(self, worker_id: WorkerId) -> bool:
        """Return whether prefill has said its token and no other.

        Its KV may all be at decode then, which tells if it is not.
        """
        has_first = self.answer.sequencer.has_first
        return worker_id != self.route.decode.worker_id and has_first and self.decoder is None


def _workers_of(route: Route) -> list[WorkerRef]:
    return [route.prefill] if route.is_local else [route.prefill, route.decode]


def _lost() -> Unavailable:
    return Unavailable("a worker of this request was lost; send it again")
