"""The decode side of a handoff: receive a prompt's KV and decode from index 1."""

from contracts.errors import PeerLost, TandemError
from contracts.ids import WorkerId
from contracts.request import Job
from engine.engine import Engine
from engine.messages import ChunkScheduled, StepOutput
from kv_transfer.events import ChunkBad, TransferEvent
from kv_transfer.node import TransferNode
from worker.core.attempt_table import AttemptTable
from worker.core.role_handler import Attempt
from worker.handoff.incoming import IncomingHandoffs
from worker.handoff.incoming_handoff import IncomingHandoff


class DecodeRole:
    """The role for jobs whose route names this worker as decode and another as prefill."""

    def __init__(self, me: WorkerId, engine: Engine, node: TransferNode, attempts: AttemptTable) -> None:
        self._me = me
        self._engine = engine
        self._attempts = attempts
        self._handoffs = IncomingHandoffs(self, engine, node, attempts)
        self._counters = dict.fromkeys(
            (
                "kv_handoffs_received_granted",
                "kv_handoffs_received_committed",
                "kv_handoffs_received_without_draft",
                "kv_handoffs_received_aborted",
                "kv_handoffs_received_waited",
                "chunks_bad",
            ),
            0.0,
        )

    def accepts(self, job: Job) -> bool:
        return job.route.decode.worker_id == self._me and not job.route.is_local

    def start(self, attempt: Attempt, now: float) -> None:
        job = attempt.job
        if not self._handoffs.begin(attempt, job.route.prefill, len(job.token_ids), now):
            self._attempts.leave(attempt)  # prefill has reported its end to the gateway

    def drop(self, attempt: Attempt, reason: str, now: float) -> None:
        handoff = self._handoffs.get(attempt)
        if handoff is None:
            self._engine.release(attempt.key)  # already decoding
            return
        self._counters["kv_handoffs_received_aborted"] += handoff.is_offered
        self._handoffs.abort(handoff, "cancelled", reason)

    def on_started(self, attempt: Attempt, now: float) -> None:
        """Do nothing: the time account of a committed request began at the commit."""

    def on_chunk_scheduled(self, attempt: Attempt, chunk: ChunkScheduled) -> None:
        """Do nothing: this role hands nothing over."""

    def on_step(self, output: StepOutput, now: float) -> None:
        if output.ended:
            self._handoffs.grant_waiting()

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        self._counters["chunks_bad"] += isinstance(event, ChunkBad)
        self._handoffs.on_transfer(event, now)

    def advance(self, now: float) -> None:
        self._handoffs.advance()

    def on_tick(self, now: float) -> None:
        self._handoffs.on_tick(now)

    def counters(self) -> dict[str, float]:
        saved = {"kv_saved_tokens": self._handoffs.num_saved_tokens}
        return self._counters | {"quarantined": self._handoffs.num_quarantined} | saved

    def is_idle(self) -> bool:
        return self._handoffs.is_idle

    # What becomes of a handoff, see IncomingOwner.

    def on_granted(self, handoff: IncomingHandoff) -> None:
        self._counters["kv_handoffs_received_granted"] += 1

    def on_waiting(self, handoff: IncomingHandoff) -> None:
        self._counters["kv_handoffs_received_waited"] += 1

    def on_committed(self, handoff: IncomingHandoff) -> None:
        self._counters["kv_handoffs_received_committed"] += 1
        is_all_here = handoff.chunks.num_groups == len(self._engine.layout.groups)
        self._counters["kv_handoffs_received_without_draft"] += not is_all_here
        if handoff.is_migration:
            self._repeat(handoff)
        else:
            self._attempts.report_state(handoff.attempt, "COMMITTED")

    def _repeat(self, handoff: IncomingHandoff) -> None:
        """Send the tokens that came with a migration.

        They tell the gateway of the commit, and it has them also if the source is lost before it has read them there.
        """
        assert handoff.fin is not None
        for token in (*handoff.fin.drawn, handoff.fin.first):
            self._attempts.token(handoff.attempt, token)

    def on_aborted(self, handoff: IncomingHandoff, code: str) -> None:
        self._counters["kv_handoffs_received_aborted"] += code != "finished"
        self._attempts.leave(handoff.attempt)

    def on_failed(self, handoff: IncomingHandoff, error: TandemError) -> None:
        if handoff.is_offered and not isinstance(error, PeerLost):
            self._counters["kv_handoffs_received_aborted"] += 1
        self._attempts.fail(handoff.attempt, error)
