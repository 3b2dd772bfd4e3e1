"""The decode side of a handoff: reserve pages just in time, check chunks, commit, decode from index 1."""

import logging
from collections import OrderedDict
from dataclasses import dataclass

from contracts import errors
from contracts.errors import Corrupt, OutOfBlocks, TandemError
from contracts.handoff import Abort, ChunkHeader, Commit, Fin, Grant, Offer, Refuse, Wait
from contracts.ids import Epoch, RequestId, WorkerId
from contracts.request import Job
from engine.engine import Engine
from engine.messages import ChunkScheduled, Reservation, StepOutput
from kv_transfer.events import ChunkBad, ChunkLanded, Drained, MessageReceived, PeerDisconnected, TransferEvent
from kv_transfer.node import TransferNode
from worker.core.attempt_table import AttemptTable
from worker.core.role import Attempt, attempt_key

log = logging.getLogger(__name__)

AttemptId = tuple[RequestId, Epoch]
EARLY_OFFER_S = 5.0
"""The seconds for which an offer waits for its job. Prefill's messages about an attempt and its job race over two
connections; a job later than this is not coming.
"""


@dataclass
class IncomingHandoff:
    """A handoff as decode sees it.

    `next_token`: all tokens before it have arrived and are checked, since `landed_s` (monotonic).
    """

    live: Attempt
    offer: Offer | None = None
    reservation: Reservation | None = None
    arrival: int = 0
    told_to_wait: bool = False
    next_token: int = 0
    num_chunks: int = 0
    nbytes: int = 0
    landed_s: float = 0.0
    fin: Fin | None = None

    @property
    def id(self) -> AttemptId:
        return self.live.job.request_id, self.live.job.epoch

    @property
    def peer_id(self) -> WorkerId:
        return self.live.job.route.prefill.worker_id

    def is_with(self, lost: PeerDisconnected) -> bool:
        prefill = self.live.job.route.prefill
        return self.offer is not None and (prefill.worker_id, prefill.incarnation) == (lost.peer_id, lost.incarnation)

    @property
    def num_tokens(self) -> int:
        return len(self.live.job.token_ids)

    @property
    def is_complete(self) -> bool:
        return self.fin is not None and self.num_chunks == self.fin.num_chunks and self.next_token == self.num_tokens

    def contradiction(self, block_size: int) -> str | None:
        """Return why the chunks that Fin claims can never be those that arrive, or None.

        Each chunk holds a block at least.
        """
        if self.fin is None:
            return None
        num_coming = self.fin.num_chunks - self.num_chunks
        num_blocks = -(-(self.num_tokens - self.next_token) // block_size)
        if min(num_blocks, 1) <= num_coming <= num_blocks:
            return None
        return f"{self.fin.num_chunks} chunks are claimed, {self.num_chunks} came and {num_blocks} blocks are missing"


class DecodeRole:
    """The role for jobs whose route names this worker as decode and another as prefill."""

    def __init__(self, me: WorkerId, engine: Engine, node: TransferNode, ledger: AttemptTable) -> None:
        self._me = me
        self._engine = engine
        self._node = node
        self._ledger = ledger
        self._incoming: dict[AttemptId, IncomingHandoff] = {}
        self._queue: OrderedDict[AttemptId, IncomingHandoff] = OrderedDict()  # offered, waiting for pages; oldest first
        self._early: dict[AttemptId, tuple[WorkerId, Offer, float]] = {}
        self._over: dict[AttemptId, float] = {}  # aborted before the job came, or after its end
        self._draining: dict[AttemptId, IncomingHandoff] = {}  # pages that a writer may still touch
        self._quarantined: set[AttemptId] = set()  # pages of a writer that could not be fenced: lost until restart
        self._counters = dict.fromkeys(
            (
                "kv_handoffs_received_granted",
                "kv_handoffs_received_committed",
                "kv_handoffs_received_aborted",
                "kv_handoffs_received_waited",
                "chunks_bad",
            ),
            0.0,
        )

    def accepts(self, job: Job) -> bool:
        return job.route.decode.worker_id == self._me and not job.route.is_local

    def start(self, live: Attempt, now: float) -> None:
        landing = IncomingHandoff(live)
        if self._over.pop(landing.id, None) is not None:
            self._ledger.leave(live)  # prefill has reported its end to the gateway
            return
        self._incoming[landing.id] = landing
        early = self._early.pop(landing.id, None)
        if early is not None:
            self._on_offer(early[0], early[1], now)

    def drop(self, live: Attempt, reason: str, now: float) -> None:
        landing = self._incoming.pop((live.job.request_id, live.job.epoch), None)
        if landing is None:
            self._engine.release(live.key)  # already decoding
            return
        self._abort(landing, "cancelled", reason)

    def on_started(self, live: Attempt, now: float) -> None:
        """Do nothing: the time account of a committed request began at the commit."""

    def on_chunk_scheduled(self, live: Attempt, chunk: ChunkScheduled) -> None:
        """Do nothing: this role hands nothing over."""

    def on_step(self, output: StepOutput, now: float) -> None:
        if output.ended:
            self._serve_queue()

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        match event:
            case MessageReceived(peer_id, Offer() as offer):
                self._on_offer(peer_id, offer, now)
            case MessageReceived(message=Fin() as fin):
                self._on_fin(fin)
            case MessageReceived(message=Abort() as abort):
                self._on_abort(abort, now)
            case ChunkLanded(_, header, landed_s):
                self._on_landed(header, landed_s)
            case ChunkBad(_, header, reason):
                self._on_bad(header, reason)
            case Drained(request_id, epoch):
                self._on_drained((request_id, epoch))
            case PeerDisconnected():
                self._on_peer_lost(event)

    def on_tick(self, now: float) -> None:
        self._serve_queue()
        for attempt_id, (_, _, since_s) in list(self._early.items()):
            if now - since_s > EARLY_OFFER_S:
                self._refuse_early(attempt_id, "no job came for this offer")
        while self._over and now - next(iter(self._over.values())) > EARLY_OFFER_S:
            del self._over[next(iter(self._over))]

    def counters(self) -> dict[str, float]:
        return self._counters | {"quarantined": len(self._quarantined)}

    def hands_over_alone(self) -> bool:
        return False

    def is_idle(self) -> bool:
        return not (self._incoming or self._draining or self._early)

    # Messages of prefill.

    def _on_offer(self, peer_id: WorkerId, offer: Offer, now: float) -> None:
        landing = self._incoming.get((offer.request_id, offer.epoch))
        if landing is None:
            # The first one counts, as in the node: a grant that fits another raises ValueError there, in our loop.
            self._early.setdefault((offer.request_id, offer.epoch), (peer_id, offer, now))
            return
        job = landing.live.job
        if (peer_id, offer.num_tokens) != (job.route.prefill.worker_id, len(job.token_ids)):
            self._fail(landing, Corrupt(f"an offer of {offer.num_tokens} tokens by {peer_id} does not fit the job"))
            return
        landing.offer = offer
        landing.arrival = self._engine.arrive()
        landing.live.stage("expect", now)
        self._queue[landing.id] = landing
        self._serve_queue()

    def _serve_queue(self) -> None:
        """Grant by priority, then in order of arrival.

        The first that finds no pages makes the rest wait, so that none is overtaken by smaller ones forever.
        """
        while self._queue:
            attempt_id, landing = min(self._queue.items(), key=_priority)
            try:
                self._grant(landing)
            except OutOfBlocks as error:
                self._tell_to_wait(str(error))
                return
            except TandemError as error:
                self._fail(landing, error)
            self._queue.pop(attempt_id, None)

    def _grant(self, landing: IncomingHandoff) -> None:
        """Reserve pages and grant them. Raises OutOfBlocks; then nothing is held."""
        reservation = self._engine.reserve(landing.live.request(), landing.arrival)
        landing.reservation = reservation
        landing.next_token = reservation.skip_tokens
        first_page = reservation.skip_tokens // self._engine.layout.block_size
        request_id, epoch = landing.id
        grant = Grant(
            request_id=request_id,
            epoch=epoch,
            pages=reservation.blocks[first_page:],
            skip_tokens=reservation.skip_tokens,
        )
        self._node.grant(landing.peer_id, grant)
        self._counters["kv_handoffs_received_granted"] += 1
        if len(self._queue) == 1:  # the grants of others must not wait for it
            self._engine.prepare(landing.live.key)  # prefill computes meanwhile

    def _tell_to_wait(self, reason: str) -> None:
        for landing in self._queue.values():
            if not landing.told_to_wait:
                landing.told_to_wait = True
                self._counters["kv_handoffs_received_waited"] += 1
                request_id, epoch = landing.id
                self._node.wait(landing.peer_id, Wait(request_id=request_id, epoch=epoch, reason=reason))

    def _on_landed(self, header: ChunkHeader, landed_s: float) -> None:
        landing = self._incoming.get((header.request_id, header.epoch))
        if landing is None or landing.reservation is None:
            self._ledger.num_stale += 1
            return
        if (header.index, header.first_token) != (landing.num_chunks, landing.next_token):
            expected = f"expected {landing.num_chunks} at {landing.next_token}"
            self._fail(landing, Corrupt(f"chunk {header.index} at token {header.first_token}; {expected}"))
            return
        landing.num_chunks += 1
        landing.next_token += header.num_tokens
        landing.nbytes += header.nbytes
        landing.landed_s = landed_s
        self._settle(landing)

    def _on_fin(self, fin: Fin) -> None:
        landing = self._incoming.get((fin.request_id, fin.epoch))
        if landing is None:
            self._ledger.num_stale += 1
            return
        landing.fin = fin
        self._settle(landing)

    def _settle(self, landing: IncomingHandoff) -> None:
        """Commit a handoff that is complete; fail one that never will be."""
        if landing.is_complete:
            self._commit(landing)
        elif reason := landing.contradiction(self._engine.layout.block_size):
            self._fail(landing, Corrupt(reason))

    def _commit(self, landing: IncomingHandoff) -> None:
        assert landing.fin is not None
        # Not `now`: the last chunk arrived up to a step ago, and a prompt that is all cached here even earlier.
        landing.live.stage("land", max(landing.live.mark_s, landing.landed_s))
        try:
            self._engine.adopt(landing.live.key, landing.fin.first)
        except TandemError as error:
            self._fail(landing, error)
            return
        del self._incoming[landing.id]
        # Every granted page has its bytes and the node lands nothing after commit: the writer's hold ends here.
        request_id, epoch = landing.id
        commit = Commit(request_id=request_id, epoch=epoch, num_chunks=landing.num_chunks, nbytes=landing.nbytes)
        self._node.commit(landing.peer_id, commit)
        self._engine.incoming_writer_ended(landing.live.key)
        self._counters["kv_handoffs_received_committed"] += 1
        self._ledger.move(landing.live, "COMMITTED")

    def _on_bad(self, header: ChunkHeader, reason: str) -> None:
        self._counters["chunks_bad"] += 1
        landing = self._incoming.get((header.request_id, header.epoch))
        if landing is not None:
            self._fail(landing, Corrupt(f"chunk {header.index} arrived broken: {reason}"))

    def _on_abort(self, abort: Abort, now: float) -> None:
        """Free an attempt that prefill has ended; prefill has reported the reason to the gateway.

        The node drains it by itself and emits Drained.
        """
        attempt_id = (abort.request_id, abort.epoch)
        self._early.pop(attempt_id, None)
        landing = self._incoming.pop(attempt_id, None)
        if landing is None:
            self._over[attempt_id] = now
            return
        self._counters["kv_handoffs_received_aborted"] += abort.code != "finished"
        self._ledger.leave(landing.live)
        self._let_go(landing)

    def _on_drained(self, attempt_id: AttemptId) -> None:
        if self._draining.pop(attempt_id, None) is not None:
            self._engine.incoming_writer_ended(attempt_key(*attempt_id))

    def _on_peer_lost(self, lost: PeerDisconnected) -> None:
        """End the requests that were not yet committed; the KV of the others is here, and they go on.

        An early offer of the lost link would be granted in vain, its pages kept from other requests. One that came over
        a newer link of that worker is refused, too.
        """
        for attempt_id in [attempt_id for attempt_id, early in self._early.items() if early[0] == lost.peer_id]:
            self._refuse_early(attempt_id, f"a connection was lost: {lost.error}")
        for landing in [a for a in self._incoming.values() if a.is_with(lost)]:
            del self._incoming[landing.id]
            self._let_go(landing)
            error = errors.PeerLost(f"prefill worker {lost.peer_id} was lost during the handoff: {lost.error}")
            self._ledger.fail(landing.live, error)
        for attempt_id in [landing.id for landing in self._draining.values() if landing.is_with(lost)]:
            del self._draining[attempt_id]
            if lost.fenced:
                self._engine.incoming_writer_ended(attempt_key(*attempt_id))
            else:
                log.error("attempt %s: its writer could not be fenced; its pages stay out of use", attempt_id)
                self._quarantined.add(attempt_id)

    # Ends.

    def _refuse_early(self, attempt_id: AttemptId, reason: str) -> None:
        peer_id, _, _ = self._early.pop(attempt_id)
        request_id, epoch = attempt_id
        self._node.refuse(peer_id, Refuse(request_id=request_id, epoch=epoch, code="unavailable", reason=reason))

    def _fail(self, landing: IncomingHandoff, error: TandemError) -> None:
        self._incoming.pop(landing.id, None)
        self._abort(landing, error.code, str(error))
        self._ledger.fail(landing.live, error)

    def _abort(self, landing: IncomingHandoff, code: str, reason: str) -> None:
        """Free the handoff, and abort it at prefill if that has offered it."""
        self._let_go(landing)
        if landing.offer is not None:
            self._counters["kv_handoffs_received_aborted"] += 1
            request_id, epoch = landing.id
            self._node.abort(landing.peer_id, Abort(request_id=request_id, epoch=epoch, code=code, reason=reason))

    def _let_go(self, landing: IncomingHandoff) -> None:
        """Drop the request's hold now; the writer's goes when the node proves that it has ended."""
        self._queue.pop(landing.id, None)
        if landing.reservation is not None:
            self._draining[landing.id] = landing
        self._engine.release(landing.live.key)  # also before a grant: the engine keeps room for requests that wait


def _priority(item: tuple[AttemptId, IncomingHandoff]) -> int:
    return item[1].live.job.priority
