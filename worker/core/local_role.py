"""The role of a worker that serves a whole request: prefill and decode on the same pages."""

from contracts.request import Job
from engine.engine import Engine
from engine.messages import ChunkScheduled, StepOutput
from kv_transfer.events import TransferEvent
from worker.core.attempt_table import AttemptTable
from worker.core.role_handler import Attempt


class LocalRole:
    """The role for local routes, a part of every core, so that any worker can serve a request alone.

    A mixed worker does little else.
    """

    def __init__(self, engine: Engine, attempts: AttemptTable) -> None:
        self._engine = engine
        self._attempts = attempts
        self._num_requests = 0

    def accepts(self, job: Job) -> bool:
        return job.route.is_local

    def start(self, attempt: Attempt, now: float) -> None:
        self._engine.submit(attempt.request())
        self._num_requests += 1
        self._attempts.report_state(attempt, "QUEUED")

    def drop(self, attempt: Attempt, reason: str, now: float) -> None:
        self._engine.release(attempt.key)

    def on_started(self, attempt: Attempt, now: float) -> None:
        """Do nothing: the pages are already where they are needed."""

    def on_chunk_scheduled(self, attempt: Attempt, chunk: ChunkScheduled) -> None:
        """Do nothing: there is no handoff."""

    def on_step(self, output: StepOutput, now: float) -> None:
        for sampled in output.sampled:
            attempt = self._attempts.of(sampled.request_id)
            if attempt is not None and attempt.role is self and attempt.is_first(sampled.token):
                self._attempts.report_state(attempt, "LOCAL_DECODE")

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        """Do nothing: there is no handoff."""

    def advance(self, now: float) -> None:
        """Do nothing: no other thread works for this role."""

    def on_tick(self, now: float) -> None:
        """Do nothing: the core watches the request's deadline."""

    def counters(self) -> dict[str, float]:
        return {"local_requests": self._num_requests}

    def is_idle(self) -> bool:
        return True
