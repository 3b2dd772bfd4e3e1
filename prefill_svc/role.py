"""The prefill side of a handoff: compute the prompt, send each chunk during the next, free on Commit."""

import logging
from dataclasses import dataclass, field

from contracts import errors
from contracts.errors import Corrupt, TandemError, Unavailable
from contracts.handoff import Abort, Commit, Fin, Grant, Offer, Refuse, Wait
from contracts.ids import Epoch, RequestId, WorkerId
from contracts.request import Job, WorkerRef
from engine.engine import Engine
from engine.messages import ChunkDone, ChunkScheduled, Sampled, StepOutput
from kv_transfer.events import Drained, MessageReceived, PeerDisconnected, TransferEvent
from kv_transfer.node import TransferNode
from worker.core.attempt_table import AttemptTable
from worker.core.role import Attempt

log = logging.getLogger(__name__)

AttemptId = tuple[RequestId, Epoch]


@dataclass
class OutgoingHandoff:
    """A handoff as prefill sees it.

    `chunks` are computed and not yet sent; pages stay held until Commit or Drained.
    """

    live: Attempt
    offered_s: float | None = None
    grant: Grant | None = None
    chunks: list[ChunkDone] = field(default_factory=list)
    num_sent: int = 0
    first: Sampled | None = None
    finished_s: float | None = None

    @property
    def id(self) -> AttemptId:
        return self.live.job.request_id, self.live.job.epoch

    @property
    def peer(self) -> WorkerRef:
        return self.live.job.route.decode

    def is_with(self, lost: PeerDisconnected) -> bool:
        return self.offered_s is not None and (self.peer.worker_id, self.peer.incarnation) == (
            lost.peer_id,
            lost.incarnation,
        )

    @property
    def is_sent(self) -> bool:
        """Return whether Fin is on its way: from then on decode reports the end of the request."""
        return self.finished_s is not None


class PrefillRole:
    """The role for jobs whose route names this worker as prefill and another as decode.

    `grant_timeout_s`: how long a computed prompt waits for pages at decode before it is decoded here instead.
    """

    def __init__(
        self, me: WorkerId, engine: Engine, node: TransferNode, ledger: AttemptTable, grant_timeout_s: float = 5.0
    ) -> None:
        self._me = me
        self._engine = engine
        self._node = node
        self._ledger = ledger
        self._grant_timeout_s = grant_timeout_s
        self._attempts: dict[AttemptId, OutgoingHandoff] = {}
        self._draining: dict[AttemptId, OutgoingHandoff] = {}
        self._counters: dict[str, float] = dict.fromkeys(
            ("handoffs_offered", "handoffs_committed", "handoffs_aborted", "handoffs_local", "commit_wait_seconds"), 0.0
        )

    def accepts(self, job: Job) -> bool:
        return job.route.prefill.worker_id == self._me and not job.route.is_local

    def start(self, live: Attempt, now: float) -> None:
        self._engine.submit(live.request(handoff=True))
        attempt = OutgoingHandoff(live)
        self._attempts[attempt.id] = attempt
        self._ledger.move(live, "QUEUED")

    def drop(self, live: Attempt, reason: str, now: float) -> None:
        attempt = self._attempts.pop((live.job.request_id, live.job.epoch), None)
        if attempt is not None:
            self._abandon(attempt, "cancelled", reason)
        else:
            self._engine.release(live.key)

    def on_started(self, live: Attempt, now: float) -> None:
        attempt = self._attempts.get((live.job.request_id, live.job.epoch))
        if attempt is None or attempt.offered_s is not None:
            return
        attempt.offered_s = now
        self._counters["handoffs_offered"] += 1
        job = live.job
        offer = Offer(job.request_id, job.epoch, len(job.token_ids), self._engine.layout.layout_id)
        self._node.offer(attempt.peer, offer)
        self._ledger.move(live, "RESERVING")

    def on_chunk_scheduled(self, live: Attempt, chunk: ChunkScheduled) -> None:
        attempt = self._attempts.get((live.job.request_id, live.job.epoch))
        if attempt is not None and attempt.offered_s is not None:
            place = (chunk.first_token, chunk.num_tokens)
            self._node.chunk_scheduled(attempt.peer.worker_id, *attempt.id, *place, chunk.blocks, chunk.early_planes)

    def on_step(self, output: StepOutput, now: float) -> None:
        for chunk in output.chunks:
            if attempt := self._of(chunk.request_id):
                attempt.chunks.append(chunk)
                self._pump(attempt, now)
        for sampled in output.sampled:
            if (attempt := self._of(sampled.request_id)) and attempt.live.is_first(sampled.token):
                attempt.first = sampled
        for ended in output.ended:
            if attempt := self._of(ended.request_id):
                self._end_here(attempt, "finished", "token 0 ended the request")
        for sampled in output.sampled:
            if attempt := self._of(sampled.request_id):
                self._pump(attempt, now)

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        match event:
            case MessageReceived(message=Grant() as grant):
                self._on_grant(grant, now)
            case MessageReceived(message=Wait() as wait):
                self._on_wait(wait)
            case MessageReceived(message=Refuse() as refuse):
                self._lose((refuse.request_id, refuse.epoch), Unavailable(f"decode refused: {refuse.reason}"))
            case MessageReceived(message=Commit() as commit):
                self._on_commit(commit, now)
            case MessageReceived(message=Abort() as abort):
                self._on_abort(abort)
            case Drained(request_id, epoch):
                self._on_drained((request_id, epoch))
            case PeerDisconnected():
                self._on_peer_lost(event)

    def on_tick(self, now: float) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.first is None or attempt.grant is not None:
                continue
            if now - attempt.live.mark_s >= self._grant_timeout_s:
                self._keep_local(attempt)

    def counters(self) -> dict[str, float]:
        return self._counters

    def hands_over_alone(self) -> bool:
        if len(self._ledger) != 1 or len(self._attempts) != 1:
            return False
        (attempt,) = self._attempts.values()
        return self._node.is_fetched_by(attempt.peer.worker_id)

    def is_idle(self) -> bool:
        return not self._attempts and not self._draining

    # Messages of decode.

    def _on_grant(self, grant: Grant, now: float) -> None:
        attempt = self._attempts.get((grant.request_id, grant.epoch))
        if attempt is None or attempt.grant is not None:
            self._ledger.num_stale += 1
            return
        if not self._fits(grant, attempt):
            self._lose(attempt.id, Corrupt(f"decode granted pages from token {grant.skip_tokens} on"))
            return
        attempt.grant = grant
        self._ledger.move(attempt.live, "TRANSFERRING")
        self._pump(attempt, now)

    def _fits(self, grant: Grant, attempt: OutgoingHandoff) -> bool:
        is_inside = 0 <= grant.skip_tokens < len(attempt.live.job.token_ids)
        return is_inside and grant.skip_tokens % self._engine.layout.block_size == 0

    def _on_wait(self, wait: Wait) -> None:
        attempt = self._attempts.get((wait.request_id, wait.epoch))
        if attempt is not None:
            self._ledger.move(attempt.live, "HELD")

    def _on_commit(self, commit: Commit, now: float) -> None:
        attempt = self._attempts.get((commit.request_id, commit.epoch))
        if attempt is None:
            self._ledger.num_stale += 1
            return
        if attempt.finished_s is None or commit.num_chunks != attempt.num_sent:
            error = Corrupt(f"decode committed {commit.num_chunks} chunks of {attempt.num_sent} sent")
            self._lose(attempt.id, error)
            return
        self._counters["handoffs_committed"] += 1
        self._counters["commit_wait_seconds"] += now - attempt.finished_s
        del self._attempts[attempt.id]
        self._engine.release(attempt.live.key)
        self._ledger.leave(attempt.live)

    def _on_abort(self, abort: Abort) -> None:
        """Free the pages of an attempt that decode has ended; decode reports the reason to the gateway."""
        attempt = self._attempts.pop((abort.request_id, abort.epoch), None)
        if attempt is not None:
            self._counters["handoffs_aborted"] += 1
            self._ledger.leave(attempt.live)
            self._draining[attempt.id] = attempt  # the node drains it by itself and emits Drained

    def _on_drained(self, attempt_id: AttemptId) -> None:
        attempt = self._draining.pop(attempt_id, None)
        if attempt is not None:
            self._engine.release(attempt.live.key)

    def _on_peer_lost(self, lost: PeerDisconnected) -> None:
        for attempt in [a for a in self._draining.values() if self._went_with(a, lost)]:
            self._on_drained(attempt.id)
        for attempt in [a for a in self._attempts.values() if self._went_with(a, lost)]:
            del self._attempts[attempt.id]
            self._counters["handoffs_aborted"] += 1
            self._engine.release(attempt.live.key)
            if attempt.is_sent:
                self._ledger.leave(attempt.live)
            else:
                error = errors.PeerLost(f"the handoff to decode worker {lost.peer_id} failed: {lost.error}")
                self._ledger.fail(attempt.live, error)

    def _went_with(self, attempt: OutgoingHandoff, lost: PeerDisconnected) -> bool:
        """Return whether the attempt was lost with the connection.

        One that was offered over a new link before this event was read was not: decode would keep its pages in vain.
        """
        return attempt.is_with(lost) and not self._node.knows(lost.peer_id, *attempt.id)

    # Chunks.

    def _pump(self, attempt: OutgoingHandoff, now: float) -> None:
        """Queue what is computed and granted; then Fin."""
        if attempt.grant is None or attempt.is_sent:
            return
        for chunk in attempt.chunks:
            self._send(attempt, chunk, attempt.grant.skip_tokens)
        attempt.chunks.clear()
        if attempt.first is not None:
            self._finish(attempt, now)

    def _send(self, attempt: OutgoingHandoff, chunk: ChunkDone, skip_tokens: int) -> None:
        """Send the part of a chunk that decode does not hold.

        `skip_tokens` and chunk starts are multiples of the block size.
        """
        end = chunk.first_token + chunk.num_tokens
        first = max(chunk.first_token, skip_tokens)
        if first >= end:
            return
        skipped = (first - chunk.first_token) // self._engine.layout.block_size
        pages, sums = chunk.blocks[skipped:], chunk.checksums.wait()[skipped:] if chunk.checksums else None
        request_id, epoch = attempt.id
        place = (attempt.num_sent, first, end - first)
        self._node.send_chunk(attempt.peer.worker_id, request_id, epoch, *place, pages, sums)
        attempt.num_sent += 1

    def _finish(self, attempt: OutgoingHandoff, now: float) -> None:
        assert attempt.first is not None
        request_id, epoch = attempt.id
        fin = Fin(request_id, epoch, attempt.num_sent, attempt.first.token, attempt.live.cached_tokens)
        self._node.finish(attempt.peer.worker_id, fin)
        attempt.finished_s = now

    # Ends.

    def _of(self, key: RequestId) -> OutgoingHandoff | None:
        live = self._ledger.of(key)
        return self._attempts.get((live.job.request_id, live.job.epoch)) if live is not None else None

    def _lose(self, attempt_id: AttemptId, error: TandemError) -> None:
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is not None:
            self._abandon(attempt, error.code, str(error))
            self._ledger.fail(attempt.live, error)

    def _end_here(self, attempt: OutgoingHandoff, code: str, reason: str) -> None:
        del self._attempts[attempt.id]
        self._abandon(attempt, code, reason)

    def _abandon(self, attempt: OutgoingHandoff, code: str, reason: str) -> None:
        """Abort the attempt at decode, and free the pages once no thread reads them any more."""
        if attempt.offered_s is None:
            self._engine.release(attempt.live.key)
            return
        self._counters["handoffs_aborted"] += code != "finished"
        self._draining[attempt.id] = attempt
        request_id, epoch = attempt.id
        abort = Abort(request_id=request_id, epoch=epoch, code=code, reason=reason)
        self._node.abort(attempt.peer.worker_id, abort)

    def _keep_local(self, attempt: OutgoingHandoff) -> None:
        """Decode the answer here, where the KV already is, since decode had no pages in time."""
        log.warning("request %s: no pages at %s in time, decoding here", attempt.id[0], attempt.peer.worker_id)
        del self._attempts[attempt.id]
        self._counters["handoffs_local"] += 1
        request_id, epoch = attempt.id
        abort = Abort(request_id=request_id, epoch=epoch, code="local", reason="decoded on the prefill worker")
        self._node.abort(attempt.peer.worker_id, abort)
        self._engine.keep_local(attempt.live.key)
        self._ledger.move(attempt.live, "LOCAL_DECODE")
