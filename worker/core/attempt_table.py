"""The requests that a core has accepted, each of which gets exactly one end."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from contracts.errors import TandemError
from contracts.events import Event, Failed, Finished, FinishReason, Prefilled, PromptScored, PromptToken, Token, Tokens
from contracts.ids import Epoch, GatewayId, RequestId
from contracts.request import Job
from worker.core.role import Attempt

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

    A request leaves by finish, fail, or leave; after that it is unknown. Events are collected until `take()`, once a
    step. Not thread-safe: it belongs to the core's loop.
    """

    def __init__(self) -> None:
        self._live: dict[RequestId, Attempt] = {}
        self._by_key: dict[RequestId, Attempt] = {}
        self._events: dict[GatewayId, list[Event]] = {}
        self._moves: list[StateReport] = []
        self._cancelled: dict[RequestId, Epoch] = {}  # requests still unknown; the oldest first
        self.num_stale = 0

    def open(self, job: Job, now: float) -> Attempt | None:
        """Accept a job, or return None if it must not run.

        That is the case if it is a duplicate or older than a known attempt, which goes on, or if its cancel arrived
        before it.
        """
        if job.request_id in self._live or job.epoch <= self._cancelled.get(job.request_id, 0):
            self.num_stale += 1
            return None
        live = Attempt(job, deadline_s=now + job.timeout_s, mark_s=now)
        self._live[job.request_id] = self._by_key[live.key] = live
        return live

    def cancelled(self, request_id: RequestId, epoch: Epoch) -> None:
        """Remember the cancel of an unknown request, which may still arrive.

        The two travel separately, and a front that was stopped reads a short cancel before the rest of a long job.
        Decode would wait for its prefill until it times out, without a report.
        """
        self._cancelled[request_id] = max(epoch, self._cancelled.pop(request_id, epoch))
        if len(self._cancelled) > MAX_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]

    def get(self, request_id: RequestId) -> Attempt | None:
        return self._live.get(request_id)

    def of(self, key: RequestId) -> Attempt | None:
        """Return the live request that the engine knows as `key`."""
        return self._by_key.get(key)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def overdue(self, now: float) -> list[Attempt]:
        return [live for live in self._live.values() if live.deadline_s <= now]

    def scored(self, live: Attempt, first_index: int, tokens: list[PromptToken]) -> None:
        self._emit(live, PromptScored(live.job.request_id, live.job.epoch, first_index, tokens))

    def prefilled(self, live: Attempt) -> None:
        job, live.has_told = live.job, True
        self._emit(live, Prefilled(job.request_id, job.epoch, live.cached_tokens, dict(live.stages_s)))

    def token(self, live: Attempt, token: Token) -> None:
        told = {} if live.has_told else dict(live.stages_s)
        live.has_told = True
        self._emit(live, Tokens(live.job.request_id, live.job.epoch, [token], told))

    def finish(self, live: Attempt, num_tokens: int, reason: FinishReason) -> None:
        job = live.job
        self._emit(live, Finished(job.request_id, job.epoch, num_tokens, reason, dict(live.stages_s)))
        self.leave(live)

    def fail(self, live: Attempt, error: TandemError) -> None:
        job = live.job
        log.warning("request %s epoch %d failed: %s: %s", job.request_id, job.epoch, error.code, error)
        self._emit(live, Failed(job.request_id, job.epoch, error.code, str(error)))
        self.leave(live)

    def leave(self, live: Attempt) -> None:
        """Forget a request whose end is reported elsewhere (handed over, cancelled, aborted by the peer)."""
        self._live.pop(live.job.request_id, None)
        self._by_key.pop(live.key, None)

    def move(self, live: Attempt, state: str) -> None:
        self._moves.append(StateReport(live.job.request_id, live.job.epoch, state))

    def take(self) -> tuple[dict[GatewayId, list[Event]], list[StateReport]]:
        """Return the events since the last call, by gateway and in order, and the state reports."""
        taken = self._events, self._moves
        self._events, self._moves = {}, []
        return taken

    def _emit(self, live: Attempt, event: Event) -> None:
        self._events.setdefault(live.job.gateway_id, []).append(event)
