"""The prefill side of a handoff: compute a prompt, send each chunk during the next."""

import logging

from contracts.errors import TandemError
from contracts.ids import RequestId, WorkerId
from contracts.request import Job
from engine.engine import Engine
from engine.messages import ChunkScheduled, StepOutput
from kv_transfer.events import TransferEvent
from kv_transfer.node import TransferNode
from worker.core.attempt_table import AttemptTable
from worker.core.role_handler import Attempt
from worker.handoff.outgoing import OutgoingHandoff, OutgoingHandoffs

log = logging.getLogger(__name__)


class PrefillRole:
    """The role for jobs whose route names this worker as prefill and another as decode.

    `grant_timeout_s`: how long a computed prompt waits for pages at decode before it is decoded here instead.
    """

    def __init__(
        self, me: WorkerId, engine: Engine, node: TransferNode, attempts: AttemptTable, grant_timeout_s: float = 5.0
    ) -> None:
        self._me = me
        self._engine = engine
        self._node = node
        self._attempts = attempts
        self._grant_timeout_s = grant_timeout_s
        self._handoffs = OutgoingHandoffs(self, node, engine.layout, engine.groups, attempts)
        self._counters: dict[str, float] = dict.fromkeys(
            ("handoffs_offered", "handoffs_committed", "handoffs_aborted", "handoffs_local", "commit_wait_seconds"), 0.0
        )

    def accepts(self, job: Job) -> bool:
        return job.route.prefill.worker_id == self._me and not (job.route.is_local or job.is_migration)

    def start(self, attempt: Attempt, now: float) -> None:
        self._engine.submit(attempt.request(handoff=True))
        self._handoffs.begin(attempt, attempt.job.route.decode, len(attempt.job.token_ids))
        self._attempts.report_state(attempt, "QUEUED")

    def drop(self, attempt: Attempt, reason: str, now: float) -> None:
        handoff = self._handoffs.get(attempt)
        if handoff is None:
            self._engine.release(attempt.key)  # decoded here
            return
        self._counters["handoffs_aborted"] += handoff.is_offered
        self._handoffs.abort(handoff, "cancelled", reason)

    def on_started(self, attempt: Attempt, now: float) -> None:
        handoff = self._handoffs.get(attempt)
        if handoff is None or handoff.is_offered:
            return
        handoff.offer()
        self._counters["handoffs_offered"] += 1
        self._attempts.report_state(attempt, "RESERVING")

    def on_chunk_scheduled(self, attempt: Attempt, chunk: ChunkScheduled) -> None:
        if handoff := self._handoffs.get(attempt):
            handoff.on_chunk_scheduled(chunk)

    def on_step(self, output: StepOutput, now: float) -> None:
        for chunk in output.chunks:
            if handoff := self._handoff(chunk.request_id):
                handoff.on_chunk(chunk, now)
        for ended in output.ended:
            if handoff := self._handoff(ended.request_id):
                self._handoffs.abort(handoff, "finished", "token 0 ended the request")
        for sampled in output.sampled:
            handoff = self._handoff(sampled.request_id)
            if handoff is not None and handoff.attempt.is_first(sampled.token):
                handoff.on_token(sampled.token, now)

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        self._handoffs.on_transfer(event, now)

    def advance(self, now: float) -> None:
        """Do nothing: what other threads do comes as events of the node."""

    def on_tick(self, now: float) -> None:
        for handoff in self._handoffs:
            is_waiting = handoff.is_computed and not handoff.is_granted
            if is_waiting and now - handoff.attempt.mark_s >= self._grant_timeout_s:
                self._keep_local(handoff)

    def counters(self) -> dict[str, float]:
        return self._counters

    def is_idle(self) -> bool:
        return self._handoffs.is_idle

    # What becomes of a handoff, see OutgoingOwner.

    def on_granted(self, handoff: OutgoingHandoff) -> None:
        self._attempts.report_state(handoff.attempt, "TRANSFERRING")

    def on_waiting(self, handoff: OutgoingHandoff) -> None:
        self._attempts.report_state(handoff.attempt, "HELD")

    def on_committed(self, handoff: OutgoingHandoff, now: float) -> None:
        assert handoff.sent_s is not None
        self._counters["handoffs_committed"] += 1
        self._counters["commit_wait_seconds"] += now - handoff.sent_s
        self._engine.release(handoff.attempt.key)
        self._attempts.leave(handoff.attempt)

    def on_failed(self, handoff: OutgoingHandoff, error: TandemError | None) -> None:
        self._counters["handoffs_aborted"] += handoff.is_offered
        if error is None:
            self._attempts.leave(handoff.attempt)
        else:
            self._attempts.fail(handoff.attempt, error)

    def on_unread(self, handoff: OutgoingHandoff) -> None:
        self._engine.release(handoff.attempt.key)

    def _handoff(self, key: RequestId) -> OutgoingHandoff | None:
        return self._handoffs.get(self._attempts.of(key))

    def _keep_local(self, handoff: OutgoingHandoff) -> None:
        """Decode the answer here, where the KV already is, since decode had no pages in time."""
        request_id, _ = handoff.id
        log.warning("request %s: no pages at %s in time, decoding here", request_id, handoff.peer.worker_id)
        self._counters["handoffs_local"] += 1
        self._handoffs.recall(handoff, "local", "decoded on the prefill worker")
        self._engine.keep_local(handoff.attempt.key)
        self._attempts.report_state(handoff.attempt, "LOCAL_DECODE")
