"""The receiving half of a handoff: grant pages just in time, check what arrives, commit.

A role holds its handoffs in an IncomingHandoffs, which reads the messages of peers and reports to the role, its
IncomingOwner, what becomes of each.
"""

import logging
from collections import OrderedDict
from typing import Protocol

from contracts.errors import Corrupt, OutOfBlocks, PeerLost, TandemError
from contracts.handoff import Abort, ChunkHeader, Commit, Fin, Offer, Refuse, Wait
from contracts.ids import RequestId, WorkerId
from contracts.request import WorkerRef
from engine.engine import Engine
from engine.fair_turns import Urgency
from kv_transfer.events import ChunkBad, ChunkLanded, Drained, MessageReceived, PeerDisconnected, TransferEvent
from kv_transfer.node import TransferNode
from worker.core.attempt_table import AttemptTable
from worker.core.chunk_order import ChunkOrder
from worker.core.granting import granted
from worker.core.role_handler import Attempt, AttemptId
from worker.handoff.incoming_handoff import IncomingHandoff

log = logging.getLogger(__name__)

EARLY_OFFER_S = 5.0
"""The seconds for which an offer waits for its job. The peer's messages about an attempt and its job race over two
connections; a job later than this is not coming.
"""


class IncomingOwner(Protocol):
    """The role that receives: it decides what becomes of a request whose handoff goes on or ends."""

    def on_granted(self, handoff: IncomingHandoff) -> None: ...

    def on_waiting(self, handoff: IncomingHandoff) -> None:
        """Handle a handoff for which there are no pages yet; the peer was told."""
        ...

    def on_committed(self, handoff: IncomingHandoff) -> None:
        """Handle a handoff that is whole; the engine goes on after it in its next step."""
        ...

    def on_aborted(self, handoff: IncomingHandoff, code: str) -> None:
        """Handle a handoff that the peer has ended; the peer reports the reason to the gateway."""
        ...

    def on_failed(self, handoff: IncomingHandoff, error: TandemError) -> None:
        """Handle a handoff that ended here; nobody else reports the error."""
        ...


class IncomingHandoffs:
    """The handoffs that one role receives, each until its Commit or the end of its last writer.

    Pages are held twice, by the request and by the writer, and are free when both have let go.
    """

    def __init__(self, owner: IncomingOwner, engine: Engine, node: TransferNode, attempts: AttemptTable) -> None:
        self._owner = owner
        self._engine = engine
        self._node = node
        self._attempts = attempts
        self._open: dict[AttemptId, IncomingHandoff] = {}
        self._queue: OrderedDict[AttemptId, IncomingHandoff] = OrderedDict()  # offered, waiting for pages; oldest first
        self._early: dict[AttemptId, tuple[WorkerId, Offer, float]] = {}
        self._loading: dict[RequestId, IncomingHandoff] = {}  # have pages, which tiers here fill: granted after that
        self._over: dict[AttemptId, float] = {}  # aborted before the job came, or after its end
        self._draining: dict[AttemptId, IncomingHandoff] = {}  # pages that a writer may still touch
        self._quarantined: set[AttemptId] = set()  # pages of a writer that could not be fenced: lost until restart
        self.num_saved_tokens = 0
        """Tokens whose KV arrived before its handoff was given up, and is kept for the next attempt."""

    def begin(self, attempt: Attempt, peer: WorkerRef, num_tokens: int, now: float) -> bool:
        """Expect the first `num_tokens` tokens of a request; return False if the peer has ended it already."""
        if self._over.pop(attempt.id, None) is not None:
            return False
        self._open[attempt.id] = IncomingHandoff(attempt, peer, num_tokens)
        early = self._early.pop(attempt.id, None)
        if early is not None:
            self._on_offer(early[0], early[1], now)
        return True

    def get(self, attempt: Attempt) -> IncomingHandoff | None:
        """Return the attempt's handoff, unless there is none or it has ended."""
        return self._open.get(attempt.id)

    @property
    def is_idle(self) -> bool:
        """Return whether no handoff is open or offered and no page may still be written."""
        return not (self._open or self._draining or self._early)

    @property
    def num_quarantined(self) -> int:
        """Return how many handoffs have pages that stay out of use until this process ends."""
        return len(self._quarantined)

    def abort(self, handoff: IncomingHandoff, code: str, reason: str) -> None:
        """Free a handoff, and end it at the peer if that has offered it."""
        self._open.pop(handoff.id, None)
        self._release(handoff)
        if handoff.is_offered:
            request_id, epoch = handoff.id
            abort = Abort(request_id=request_id, epoch=epoch, code=code, reason=reason)
            self._node.abort(handoff.peer.worker_id, abort)

    def grant_waiting(self) -> None:
        """Grant pages by priority, then in turn.

        The first that finds none makes the rest wait, so that none is overtaken by smaller ones forever.
        """
        while self._queue:
            attempt_id, handoff = min(self._queue.items(), key=_urgency)
            try:
                self._grant(handoff)
            except OutOfBlocks as error:
                self._send_waits(str(error))
                return
            except TandemError as error:
                self._fail(handoff, error)
            self._queue.pop(attempt_id, None)

    def advance(self) -> None:
        """Grant the pages that tiers here did not fill, once they have filled the others."""
        for key, num_tokens in self._engine.finished_loads() if self._loading else []:
            self._send_grant(self._loading.pop(key), num_tokens)

    def on_tick(self, now: float) -> None:
        """Grant what can be granted, and forget offers and ends whose job did not come."""
        self.grant_waiting()
        for attempt_id, (_, _, since_s) in list(self._early.items()):
            if now - since_s > EARLY_OFFER_S:
                self._refuse_early(attempt_id, "no job came for this offer")
        while self._over and now - next(iter(self._over.values())) > EARLY_OFFER_S:
            del self._over[next(iter(self._over))]

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        """Handle an event of the node; those that belong to no handoff of this half are passed over."""
        match event:
            case MessageReceived(peer_id, Offer() as offer):
                self._on_offer(peer_id, offer, now)
            case MessageReceived(message=Fin() as fin):
                self._on_fin(fin)
            case MessageReceived(message=Abort() as abort):
                self._on_abort(abort, now)
            case ChunkLanded(_, header, landed_s):
                self._on_chunk(header, landed_s)
            case ChunkBad(_, header, reason):
                if handoff := self._open.get((header.request_id, header.epoch)):
                    self._fail(handoff, Corrupt(f"chunk {header.index} arrived broken: {reason}"))
            case Drained(request_id, epoch):
                if handoff := self._draining.pop((request_id, epoch), None):
                    self._writer_ended(handoff)
            case PeerDisconnected():
                self._on_peer_lost(event)
            case _:
                pass

    def _on_offer(self, peer_id: WorkerId, offer: Offer, now: float) -> None:
        handoff = self._open.get((offer.request_id, offer.epoch))
        if handoff is None:
            # The first one counts, as in the node: a grant that fits another raises ValueError there, in our loop.
            self._early.setdefault((offer.request_id, offer.epoch), (peer_id, offer, now))
            return
        if peer_id != handoff.peer.worker_id or not handoff.fits(offer):
            self._fail(handoff, Corrupt(f"an offer of {offer.num_tokens} tokens by {peer_id} does not fit the job"))
            return
        handoff.offer = offer
        handoff.turn = self._engine.arrive(handoff.attempt.request())
        handoff.attempt.stage("expect", now)
        self._queue[handoff.id] = handoff
        self.grant_waiting()

    def _grant(self, handoff: IncomingHandoff) -> None:
        """Reserve pages, and grant those that nothing here fills. Raises OutOfBlocks; then nothing is held."""
        assert handoff.offer is not None
        bound = handoff.offer.num_tokens if handoff.is_migration else None
        request = handoff.attempt.request(loss=self._node.loss_from(handoff.peer.worker_id))
        reservation = self._engine.reserve(request, handoff.turn, bound)
        handoff.reservation = reservation
        if self._begins_to_load(handoff, handoff.offer):
            self._loading[handoff.attempt.key] = handoff
        else:
            self._send_grant(handoff, reservation.skip_tokens)
        if len(self._queue) == 1 and not handoff.is_migration:  # the grants of others must not wait for it
            self._engine.prepare(handoff.attempt.key)  # the peer computes meanwhile

    def _begins_to_load(self, handoff: IncomingHandoff, offer: Offer) -> bool:
        """Return whether tiers here fill the first pages, for the link is slower."""
        layout = self._engine.layout
        tokens_per_s = offer.nbytes_per_s / layout.block_nbytes * layout.block_size
        return tokens_per_s > 0 and self._engine.load_reserved(handoff.attempt.key, tokens_per_s)

    def _send_grant(self, handoff: IncomingHandoff, num_here: int) -> None:
        """Grant the pages behind the first `num_here` tokens, whose KV is here."""
        assert handoff.reservation is not None
        groups = self._node.groups_with(handoff.peer.worker_id, sends=False)
        grant = granted(handoff.id, self._engine, handoff.reservation, groups, num_here, handoff.num_tokens)
        handoff.chunks = ChunkOrder(grant.group_skips)
        self._node.grant(handoff.peer.worker_id, grant)
        self._owner.on_granted(handoff)

    def _send_waits(self, reason: str) -> None:
        for handoff in self._queue.values():
            if not handoff.has_waited:
                handoff.has_waited = True
                request_id, epoch = handoff.id
                self._node.wait(handoff.peer.worker_id, Wait(request_id=request_id, epoch=epoch, reason=reason))
                self._owner.on_waiting(handoff)

    def _on_chunk(self, header: ChunkHeader, landed_s: float) -> None:
        handoff = self._open.get((header.request_id, header.epoch))
        if handoff is None or handoff.reservation is None:
            self._attempts.num_stale += 1
            return
        try:
            handoff.on_chunk(header, landed_s)
        except Corrupt as error:
            self._refute(handoff, error)
            return
        if header.loss:
            self._engine.incoming_lost(handoff.attempt.key, header.first_token, header.loss)
        self._check_complete(handoff)

    def _on_fin(self, fin: Fin) -> None:
        handoff = self._open.get((fin.request_id, fin.epoch))
        if handoff is None:
            self._attempts.num_stale += 1
            return
        try:
            handoff.on_fin(fin)
        except Corrupt as error:
            self._refute(handoff, error)
            return
        self._check_complete(handoff)

    def _check_complete(self, handoff: IncomingHandoff) -> None:
        """Commit a handoff that is complete; fail one that never will be."""
        if handoff.is_complete:
            self._commit(handoff)
        elif reason := handoff.contradiction(self._engine.layout.block_size):
            self._refute(handoff, Corrupt(reason))

    def _commit(self, handoff: IncomingHandoff) -> None:
        assert handoff.fin is not None
        # Not `now`: the last chunk arrived up to a step ago, and a prompt that is all cached here even earlier.
        handoff.attempt.stage("land", max(handoff.attempt.mark_s, handoff.landed_s))
        try:
            drawn = (handoff.fin.drawn,) if handoff.is_migration else ()
            self._engine.adopt(handoff.attempt.key, handoff.fin.first, *drawn)
        except TandemError as error:
            self._fail(handoff, error)
            return
        del self._open[handoff.id]
        request_id, epoch = handoff.id
        chunks = handoff.chunks
        commit = Commit(request_id=request_id, epoch=epoch, num_chunks=chunks.num_chunks, nbytes=chunks.nbytes)
        is_drained = self._node.commit(handoff.peer.worker_id, commit)
        # Each page of a prompt has its bytes, and gets no others. Of an answer more pages were granted than Fin says.
        if is_drained or not handoff.is_migration:
            self._engine.incoming_writer_ended(handoff.attempt.key)
        else:
            handoff.is_contradictory = True
            self._draining[handoff.id] = handoff
        self._owner.on_committed(handoff)

    def _on_abort(self, abort: Abort, now: float) -> None:
        """Free a handoff that the peer has ended; the node drains it by itself and emits Drained."""
        attempt_id = (abort.request_id, abort.epoch)
        self._early.pop(attempt_id, None)
        handoff = self._open.pop(attempt_id, None)
        if handoff is None:
            self._over[attempt_id] = now
            return
        self._release(handoff)
        self._owner.on_aborted(handoff, abort.code)

    def _on_peer_lost(self, lost: PeerDisconnected) -> None:
        """End the handoffs that were not yet committed; the KV of the others is here, and they go on.

        An early offer of the lost link would be granted in vain, its pages kept from other requests. One that came over
        a newer link of that worker is refused, too.
        """
        for attempt_id in [attempt_id for attempt_id, early in self._early.items() if early[0] == lost.peer_id]:
            self._refuse_early(attempt_id, f"a connection was lost: {lost.error}")
        for handoff in [each for each in self._open.values() if each.was_lost_with(lost)]:
            del self._open[handoff.id]
            self._release(handoff)
            error = PeerLost(f"prefill worker {lost.peer_id} was lost during the handoff: {lost.error}")
            self._owner.on_failed(handoff, error)
        for handoff in [each for each in self._draining.values() if each.was_lost_with(lost)]:
            del self._draining[handoff.id]
            if lost.fenced:
                self._writer_ended(handoff)
            else:
                log.error("attempt %s: its writer could not be fenced; its pages stay out of use", handoff.id)
                self._quarantined.add(handoff.id)

    def _refuse_early(self, attempt_id: AttemptId, reason: str) -> None:
        peer_id, _, _ = self._early.pop(attempt_id)
        request_id, epoch = attempt_id
        self._node.refuse(peer_id, Refuse(request_id=request_id, epoch=epoch, code="unavailable", reason=reason))

    def _refute(self, handoff: IncomingHandoff, error: Corrupt) -> None:
        handoff.is_contradictory = True
        self._fail(handoff, error)

    def _fail(self, handoff: IncomingHandoff, error: TandemError) -> None:
        self.abort(handoff, error.code, str(error))
        self._owner.on_failed(handoff, error)

    def _writer_ended(self, handoff: IncomingHandoff) -> None:
        """Drop the writer's hold on the pages of a handoff that was given up.

        What had arrived by then, in order from the first token on, stays: the next attempt moves only the rest. But not
        what nobody checked, see contracts.kv_loss, nor anything of a peer that contradicted itself.
        """
        # A migration brings KV of more tokens, which are not known before its Fin.
        num_known = min(handoff.chunks.next_token, len(handoff.attempt.job.token_ids))
        num_checked = 0 if handoff.is_contradictory else num_known
        num_saved = self._engine.incoming_writer_ended(handoff.attempt.key, num_checked)
        if num_saved:
            self.num_saved_tokens += num_saved
            log.info("attempt %s: the KV of %d tokens had arrived, and is kept", handoff.id, num_saved)

    def _release(self, handoff: IncomingHandoff) -> None:
        """Drop the request's hold now; the writer's goes when the node proves that it has ended.

        Before a grant there is no writer but a load from tiers here, which ends with the request.
        """
        if self._queue.pop(handoff.id, None) is not None:
            self._engine.give_up_turn(handoff.attempt.request())
        is_loading = self._loading.pop(handoff.attempt.key, None) is not None
        if handoff.reservation is not None and not is_loading:
            self._draining[handoff.id] = handoff
        self._engine.release(handoff.attempt.key)  # before a grant, too: the engine keeps room for requests that wait
        if is_loading:
            self._engine.incoming_writer_ended(handoff.attempt.key)


def _urgency(item: tuple[AttemptId, IncomingHandoff]) -> Urgency:
    return item[1].attempt.job.priority, item[1].turn
