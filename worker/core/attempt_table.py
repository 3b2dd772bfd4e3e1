"""The requests that a core has accepted, each of which gets exactly one end."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from contracts.errors import TandemError, Unavailable
from contracts.events import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Moved,
    Prefilled,
    PromptScored,
    PromptToken,
    Token,
    Tokens,
)
from contracts.ids import Epoch, GatewayId, RequestId
from contracts.kv_loss import EXACT
from contracts.request import Job
from worker.core.role_handler import Attempt

log = logging.getLogger(__name__)

MAX_CANCELLED = 4096


@dataclass(frozen=True)
class StateReport:
    """A transition of a request to `state` of the coordinator's table, reported off the token path."""

    request_id: RequestId
    epoch: Epoch
    state: str


class AttemptTable:
    """The owner of every accepted request until its end.

    A request leaves by finish, fail, moved, or leave; after that it is unknown. Beside its attempt, a request may have
    a migration that takes it elsewhere. Events are collected until `take()`, once a step. Not thread-safe: it belongs
    to the core's loop. `loss`: that of the attempts, see Attempt.
    """

    def __init__(self, loss: str = EXACT) -> None:
        self._loss = loss
        self._by_id: dict[RequestId, Attempt] = {}
        self._by_key: dict[RequestId, Attempt] = {}
        self._migrations: dict[RequestId, Attempt] = {}
        self._events: dict[GatewayId, list[Event]] = {}
        self._reports: list[StateReport] = []
        self._cancelled: dict[RequestId, Epoch] = {}  # requests still unknown; the oldest first
        self.num_stale = 0

    def open(self, job: Job, now: float) -> Attempt | None:
        """Accept a job, or return None if it must not run.

        That is the case if it is a duplicate or older than a known attempt, which goes on, or if its cancel arrived
        before it.
        """
        if job.request_id in self._by_id or job.epoch <= self._cancelled.get(job.request_id, 0):
            self.num_stale += 1
            return None
        attempt = Attempt(job, deadline_s=now + job.timeout_s, mark_s=now, loss=self._loss)
        self._by_id[job.request_id] = self._by_key[attempt.key] = attempt
        return attempt

    def open_migration(self, job: Job, now: float) -> Attempt:
        """Accept the migration of an answer that is decoded here; its attempt stays what `get` returns.

        Raises Unavailable if there is no such answer, or one migration of it has not ended yet.
        """
        running = self._by_id.get(job.request_id)
        if running is None or running.job.epoch >= job.epoch:
            raise Unavailable("the answer to be moved is not here")
        if job.request_id in self._migrations:
            raise Unavailable("the answer to be moved is on its way already")
        migration = Attempt(job, deadline_s=now + job.timeout_s, mark_s=now)
        self._migrations[job.request_id] = migration
        return migration

    def migration(self, request_id: RequestId, epoch: Epoch) -> Attempt | None:
        """Return the migration of a request under this epoch, unless there is none or it has ended."""
        migration = self._migrations.get(request_id)
        return migration if migration is not None and migration.job.epoch == epoch else None

    def cancelled(self, request_id: RequestId, epoch: Epoch) -> None:
        """Remember the cancel of an unknown request, which may still arrive.

        The two travel separately, and a front that was stopped reads a short cancel before the rest of a long job.
        Decode would wait for its prefill until it times out, without a report.
        """
        self._cancelled[request_id] = max(epoch, self._cancelled.pop(request_id, epoch))
        if len(self._cancelled) > MAX_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]

    def get(self, request_id: RequestId) -> Attempt | None:
        return self._by_id.get(request_id)

    def of(self, key: RequestId) -> Attempt | None:
        """Return the attempt that the engine knows as `key`."""
        return self._by_key.get(key)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def overdue(self, now: float) -> list[Attempt]:
        return [attempt for attempt in self._by_id.values() if attempt.deadline_s <= now]

    def scored(self, attempt: Attempt, first_index: int, tokens: list[PromptToken]) -> None:
        self._emit(attempt, PromptScored(attempt.job.request_id, attempt.job.epoch, first_index, tokens))

    def prefilled(self, attempt: Attempt) -> None:
        job, attempt.has_sent_stages = attempt.job, True
        self._emit(attempt, Prefilled(job.request_id, job.epoch, attempt.cached_tokens, dict(attempt.stages_s)))

    def token(self, attempt: Attempt, token: Token) -> None:
        self.tokens(attempt, [token])

    def tokens(self, attempt: Attempt, tokens: list[Token], num_drafted: int = 0, num_accepted: int = 0) -> None:
        """Report the tokens of a step, of which `num_accepted` were among the `num_drafted` that it verified."""
        stages_s = {} if attempt.has_sent_stages else dict(attempt.stages_s)
        attempt.has_sent_stages = True
        attempt.recent.extend(tokens)
        job = attempt.job
        self._emit(attempt, Tokens(job.request_id, job.epoch, tokens, stages_s, num_drafted, num_accepted))

    def finish(self, attempt: Attempt, num_tokens: int, reason: FinishReason) -> None:
        job = attempt.job
        self._emit(attempt, Finished(job.request_id, job.epoch, num_tokens, reason, attempt.account()))
        self.leave(attempt)

    def moved(self, attempt: Attempt) -> None:
        """End an attempt whose answer goes on at the destination of its migration."""
        self._emit(attempt, Moved(attempt.job.request_id, attempt.job.epoch))
        self.leave(attempt)

    def report_failed(self, attempt: Attempt, error: TandemError) -> None:
        """Report an attempt as failed that stays known, since its end is for the gateway to decide."""
        job = attempt.job
        self._emit(attempt, Failed(job.request_id, job.epoch, error.code, str(error)))

    def fail(self, attempt: Attempt, error: TandemError) -> None:
        job = attempt.job
        log.warning("request %s epoch %d failed: %s: %s", job.request_id, job.epoch, error.code, error)
        self.report_failed(attempt, error)
        self.leave(attempt)

    def leave(self, attempt: Attempt) -> None:
        """Forget an attempt whose end is reported elsewhere (handed over, cancelled, aborted by the peer)."""
        for known in (self._by_id, self._migrations):
            if known.get(attempt.job.request_id) is attempt:
                del known[attempt.job.request_id]
        self._by_key.pop(attempt.key, None)

    def report_state(self, attempt: Attempt, state: str) -> None:
        self._reports.append(StateReport(attempt.job.request_id, attempt.job.epoch, state))

    def take(self) -> tuple[dict[GatewayId, list[Event]], list[StateReport]]:
        """Return the events since the last call, by gateway and in order, and the state reports."""
        taken = self._events, self._reports
        self._events, self._reports = {}, []
        return taken

    def _emit(self, attempt: Attempt, event: Event) -> None:
        self._events.setdefault(attempt.job.gateway_id, []).append(event)
