"""The source of a migration: an answer is decoded here while its KV goes to another worker.

Full blocks are sent while the answer goes on, then those that have come since, and when nothing waits to be sent the
answer is paused for the rest. Until the destination commits it can go on here: before Fin this worker decides that by
itself. After Fin the destination may have committed, so the gateway, which reads both, decides.
"""

import logging
from dataclasses import dataclass

from contracts import codec
from contracts.errors import OutOfBlocks, TandemError, TransferError, Unavailable
from contracts.events import Token
from contracts.handoff import MAX_MOVED_NBYTES, MAX_MOVED_TOKENS
from contracts.ids import RequestId, WorkerId
from contracts.request import Job
from engine.engine import Engine
from engine.messages import ChunkScheduled, StepOutput
from engine.sequence import Status
from kv_transfer.events import TransferEvent
from kv_transfer.node import TransferNode
from worker.core.attempt_table import AttemptTable
from worker.core.role_handler import Attempt, AttemptId
from worker.handoff.outgoing import OutgoingHandoff, OutgoingHandoffs

log = logging.getLogger(__name__)

MIGRATION_TIMEOUT_S = 10.0
"""The seconds within which a migration has sent all, or ends."""
REPORT_PERIOD_S = 1.0
"""How often the gateway is told of a migration in doubt, until it decides."""


@dataclass
class Migration:
    """A migration, and the attempt whose answer it moves.

    `tokens`: those of the answer after the migration's job. `most_tokens`: how much KV may come. `paused_s`: since when
    the answer is paused. `is_in_doubt`: the destination may have committed; `reported_s`: when the gateway was told.
    """

    attempt: Attempt
    source: Attempt
    handoff: OutgoingHandoff
    tokens: list[Token]
    most_tokens: int
    began_s: float
    paused_s: float | None = None
    is_in_doubt: bool = False
    reported_s: float = 0.0

    @property
    def key(self) -> RequestId:
        """Return the engine's id of the answer."""
        return self.source.key


class MigrationSource:
    """The role for migrations of answers that are decoded here.

    The attempts of these answers stay in the table until the commit.
    """

    def __init__(self, me: WorkerId, engine: Engine, node: TransferNode, attempts: AttemptTable) -> None:
        self._me, self._engine, self._attempts = me, engine, attempts
        self._handoffs = OutgoingHandoffs(self, node, engine.layout, engine.groups, attempts)
        self._migrations: dict[AttemptId, Migration] = {}
        self._readers: dict[AttemptId, RequestId] = {}  # whose pages a peer may read
        self._counters: dict[str, float] = dict.fromkeys(
            ("migrations_begun", "migrations_committed", "migrations_failed", "migration_pause_seconds"), 0.0
        )

    def accepts(self, job: Job) -> bool:
        return job.is_migration and job.route.prefill.worker_id == self._me

    def start(self, attempt: Attempt, now: float) -> None:
        """Offer the KV of the answer. Raises Unavailable if it can't move now."""
        source = self._attempts.get(attempt.job.request_id)
        if source is None or source.key in self._readers.values():
            raise Unavailable("the answer's former migration has not ended yet")
        tokens, most_tokens = self._tokens(attempt.job, source), self._most_tokens(attempt.job)
        try:
            self._engine.exports.begin(source.key, len(attempt.job.token_ids), most_tokens)
        except OutOfBlocks as error:
            raise Unavailable(f"the answer can't be moved now: {error}") from error
        handoff = self._handoffs.begin(attempt, attempt.job.route.decode, most_tokens, is_bound=True)
        self._migrations[attempt.id] = Migration(attempt, source, handoff, tokens, most_tokens, now)
        self._readers[attempt.id] = source.key
        handoff.offer()
        self._counters["migrations_begun"] += 1

    def drop(self, attempt: Attempt, reason: str, now: float) -> None:
        """Go on here with an answer whose migration was cancelled."""
        if migration := self._migrations.get(attempt.id):
            self._end(migration, "cancelled", reason)

    def on_started(self, attempt: Attempt, now: float) -> None:
        """Do nothing: what moves was started before."""

    def on_chunk_scheduled(self, attempt: Attempt, chunk: ChunkScheduled) -> None:
        """Do nothing: blocks are sent once they are full."""

    def on_step(self, output: StepOutput, now: float) -> None:
        if not self._migrations:
            return
        by_key = {migration.key: migration for migration in self._migrations.values()}
        for sampled in output.sampled:
            if migration := by_key.get(sampled.request_id):
                migration.tokens.append(sampled.token)
        for ended in output.ended:
            if migration := by_key.get(ended.request_id):
                self._leave(migration, "finished", "the answer has ended")
        self._advance_all(now)

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        self._handoffs.on_transfer(event, now)

    def advance(self, now: float) -> None:
        """Do nothing: what other threads do comes as events of the node."""

    def on_tick(self, now: float) -> None:
        self._advance_all(now)
        for migration in list(self._migrations.values()):
            if not migration.handoff.is_sent and now - migration.began_s >= MIGRATION_TIMEOUT_S:
                self._give_up(migration, f"the answer was not moved within {MIGRATION_TIMEOUT_S:.0f} s")
            elif migration.is_in_doubt and now - migration.reported_s >= REPORT_PERIOD_S:
                self._report_doubt(migration, now)

    def counters(self) -> dict[str, float]:
        return self._counters

    def is_idle(self) -> bool:
        return self._handoffs.is_idle and not self._migrations

    # What becomes of a handoff, see OutgoingOwner.

    def on_granted(self, handoff: OutgoingHandoff) -> None:
        """Do nothing: blocks are sent with the next step."""

    def on_waiting(self, handoff: OutgoingHandoff) -> None:
        """End a migration to a worker that has no room: the answer has pages here."""
        if migration := self._migrations.get(handoff.id):
            self._give_up(migration, f"{handoff.peer.worker_id} has no pages for the answer")

    def on_committed(self, handoff: OutgoingHandoff, now: float) -> None:
        migration = self._migrations.pop(handoff.id)
        assert migration.paused_s is not None
        self._counters["migrations_committed"] += 1
        self._counters["migration_pause_seconds"] += now - migration.paused_s
        self._engine.release(migration.key)
        self.on_unread(handoff)
        self._attempts.leave(migration.attempt)
        if self._is_here(migration):
            self._attempts.moved(migration.source)

    def on_failed(self, handoff: OutgoingHandoff, error: TandemError | None) -> None:
        migration = self._migrations.get(handoff.id)
        if migration is None:
            return
        if handoff.is_sent:
            migration.is_in_doubt = True  # the next tick reports it
            return
        self._forget(migration)
        self._attempts.fail(migration.attempt, error or TransferError("the destination ended the migration"))

    def on_unread(self, handoff: OutgoingHandoff) -> None:
        if key := self._readers.pop(handoff.id, None):
            self._engine.exports.reader_ended(key)

    def _tokens(self, job: Job, source: Attempt) -> list[Token]:
        """Return the tokens of the answer that the job does not have.

        Raises Unavailable if they are not known.
        """
        sequence = self._engine.sequences.get(source.key)
        if sequence is None or sequence.handoff or not sequence.has_grown:
            raise Unavailable("the answer to be moved is not decoded here yet")
        tokens = [token for token in source.recent if token.index >= job.num_answered]
        num_drawn = sequence.num_generated - sequence.num_pending
        if len(tokens) != num_drawn - job.num_answered:
            raise Unavailable(f"the answer has {num_drawn} tokens, its migration begins after {job.num_answered}")
        return tokens

    def _most_tokens(self, job: Job) -> int:
        """Return how much KV the answer may have when it is paused. The newest token has none.

        The destination reserves pages for so many.
        """
        num_left = min(job.sampling.max_tokens - job.num_answered, MAX_MOVED_TOKENS)
        most_tokens = min(len(job.token_ids) + num_left, self._engine.max_model_len) - 1
        if most_tokens < len(job.token_ids):
            raise Unavailable("the answer to be moved is about to end")
        return most_tokens

    def _is_here(self, migration: Migration) -> bool:
        return self._attempts.of(migration.key) is migration.source

    def _advance_all(self, now: float) -> None:
        for migration in list(self._migrations.values()):
            if not self._is_here(migration):
                self._leave(migration, "cancelled", "the answer has ended")
            elif migration.handoff.is_granted and not migration.handoff.is_sent:
                self._advance(migration, now)

    def _advance(self, migration: Migration, now: float) -> None:
        """Send what is computed; pause the answer once that is little, and send the rest."""
        sequence, exports = self._engine.sequences.get(migration.key), self._engine.exports
        if sequence is None:  # it has failed in the step whose output is being read
            self._leave(migration, "failed", "the answer has failed")
            return
        if sequence.status in (Status.WAITING, Status.LOADING) or not exports.is_kept(migration.key):
            self._give_up(migration, "the answer was preempted")
            return
        if len(sequence.tokens) > migration.most_tokens:
            self._give_up(migration, f"the answer got {len(migration.tokens)} tokens meanwhile")
            return
        if migration.paused_s is None:
            if chunk := exports.blocks(migration.key):
                migration.handoff.on_chunk(chunk, now)
            elif migration.tokens and not migration.handoff.has_queued() and exports.pause(migration.key):
                migration.paused_s = now
        if migration.paused_s is not None and (tail := exports.tail(migration.key)):
            if len(codec.encode(migration.tokens)) > MAX_MOVED_NBYTES:
                self._give_up(migration, "the log-probabilities of the tokens it got meanwhile do not fit a message")
                return
            if tail.chunk is not None:
                migration.handoff.on_chunk(tail.chunk, now)
            migration.handoff.on_tail(migration.tokens, tail.num_tokens, now)

    def _report_doubt(self, migration: Migration, now: float) -> None:
        """Ask the gateway whether the destination has committed, since the link to it was lost after Fin."""
        migration.reported_s = now
        peer_id = migration.handoff.peer.worker_id
        error = TransferError(f"it is not known whether {peer_id} has the answer that moves")
        self._attempts.report_failed(migration.attempt, error)

    def _give_up(self, migration: Migration, reason: str) -> None:
        """Go on here, and report that the migration has failed."""
        self._end(migration, "unavailable", reason)
        self._attempts.fail(migration.attempt, Unavailable(reason))

    def _leave(self, migration: Migration, code: str, reason: str) -> None:
        """End a migration whose answer is no longer here, whose end is reported by itself."""
        self._end(migration, code, reason)
        self._attempts.leave(migration.attempt)

    def _end(self, migration: Migration, code: str, reason: str) -> None:
        """End a migration here and at the destination; an answer that was paused goes on."""
        self._forget(migration)
        if handoff := self._handoffs.get(migration.attempt):
            self._handoffs.abort(handoff, code, reason)

    def _forget(self, migration: Migration) -> None:
        log.info("request %s is not moved by its migration %d", *migration.attempt.id)
        self._counters["migrations_failed"] += 1
        del self._migrations[migration.attempt.id]
        self._engine.exports.resume(migration.key)
