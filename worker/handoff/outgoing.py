"""The sending half of a handoff: each chunk goes while the next is computed, then Fin.

A role holds its handoffs in an OutgoingHandoffs, which reads the messages of peers and reports to the role, its
OutgoingOwner, what becomes of each.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from contracts.errors import Corrupt, PeerLost, TandemError, Unavailable
from contracts.events import Token
from contracts.handoff import Abort, Commit, Fin, Grant, Offer, Refuse, Wait
from contracts.ids import BlockId
from contracts.layout import KVLayout
from contracts.request import WorkerRef
from engine.cache.kv_groups import KVGroups
from engine.messages import ChunkDone, ChunkScheduled
from kv_transfer.events import Drained, MessageReceived, PeerDisconnected, TransferEvent
from kv_transfer.node import TransferNode
from worker.core.attempt_table import AttemptTable
from worker.core.role_handler import Attempt, AttemptId


class OutgoingHandoff:
    """The KV of one sequence on its way to `peer`: `num_tokens` tokens, then the one to go on after.

    If it `is_bound`, at most so many; Fin says how many came. Chunks that are computed before the peer has granted
    pages wait here. Their pages must stay as they are until OutgoingOwner hears `on_committed` or `on_unread`.
    """

    def __init__(
        self,
        attempt: Attempt,
        peer: WorkerRef,
        num_tokens: int,
        node: TransferNode,
        layout: KVLayout,
        page_tables: KVGroups,
        is_bound: bool = False,
    ) -> None:
        self.attempt = attempt
        self.peer = peer
        self._num_tokens, self._is_bound = num_tokens, is_bound
        self._node = node
        self._layout, self._page_tables = layout, page_tables
        self._first_needed = layout.skips(0, len(attempt.job.token_ids))
        self._grant: Grant | None = None
        self._groups: Sequence[int] = ()
        self._chunks: list[ChunkDone] = []
        self._token: Token | None = None
        self._drawn: list[Token] = []
        self._num_told: int | None = None
        self._num_sent = 0
        self.is_offered = False
        self.sent_s: float | None = None
        """When Fin was sent (monotonic seconds); from then on the peer reports the end of the request."""

    @property
    def id(self) -> AttemptId:
        return self.attempt.id

    @property
    def is_sent(self) -> bool:
        return self.sent_s is not None

    @property
    def is_granted(self) -> bool:
        return self._grant is not None

    @property
    def is_computed(self) -> bool:
        """Return whether the last token is known, so that the handoff waits for the peer alone."""
        return self._token is not None

    def was_lost_with(self, lost: PeerDisconnected) -> bool:
        """Return whether the handoff ended with the connection.

        One that was offered over a new link before this event was read did not: the peer would keep its pages in vain.
        """
        is_with = (self.peer.worker_id, self.peer.incarnation) == (lost.peer_id, lost.incarnation)
        return self.is_offered and is_with and not self._node.knows(lost.peer_id, *self.id)

    def offer(self) -> None:
        """Ask the peer for pages. Chunks may be computed meanwhile."""
        self.is_offered = True
        request_id, epoch = self.id
        offer = Offer(request_id, epoch, self._num_tokens, self._layout.layout_id, self._is_bound)
        self._node.offer(self.peer, offer)

    def on_chunk_scheduled(self, chunk: ChunkScheduled) -> None:
        """Announce a chunk that is about to be computed, if the peer was asked for pages."""
        if self.is_offered:
            for group in self._node.groups_with(self.peer.worker_id, sends=True):
                early = 0 if group else chunk.early_planes  # those of other groups are computed after the model's
                first, pages = self._from(chunk, group, self._first_needed[group])
                if pages:
                    place = first, chunk.first_token + chunk.num_tokens - first
                    self._node.chunk_scheduled(self.peer.worker_id, *self.id, *place, pages, early, group)

    def on_chunk(self, chunk: ChunkDone, now: float) -> None:
        self._chunks.append(chunk)
        self._send_ready(now)

    def on_token(self, token: Token, now: float) -> None:
        """Send `token` in Fin, after the chunks that were computed before it."""
        self._token = token
        self._send_ready(now)

    def on_tail(self, tokens: list[Token], num_tokens: int, now: float) -> None:
        """Send Fin after the chunks, of an offer that is a bound: `num_tokens` of KV came.

        `tokens`: those of the answer after the job's, the last of which the peer goes on after.
        """
        self._drawn, self._num_told = tokens[:-1], num_tokens
        self.on_token(tokens[-1], now)

    def has_queued(self) -> bool:
        """Return whether chunks wait here or in the link, or one is being sent."""
        return bool(self._chunks) or self._node.has_queued(self.peer.worker_id, *self.id)

    def on_grant(self, grant: Grant, now: float) -> None:
        """Send what is computed. Raises Corrupt if the grant skips what a peer can't have."""
        is_inside = 0 <= grant.skip_tokens < self._num_tokens
        if not is_inside or grant.skip_tokens % self._layout.block_size:
            raise Corrupt(f"decode granted pages from token {grant.skip_tokens} on")
        self._grant, self._groups = grant, self._node.groups_with(self.peer.worker_id, sends=True)
        expected = [max(grant.skip_tokens, self._first_needed[group]) for group in self._groups]
        if grant.skips() != expected:
            raise Corrupt(f"decode granted pages from tokens {grant.skips()} on; they move from {expected} on")
        self._send_ready(now)

    def check_commit(self, commit: Commit) -> None:
        """Raise Corrupt if the peer commits other chunks than were sent."""
        if not self.is_sent or commit.num_chunks != self._num_sent:
            raise Corrupt(f"decode committed {commit.num_chunks} chunks of {self._num_sent} sent")

    def abort(self, code: str, reason: str) -> None:
        """End the handoff at the peer. The node drains the attempt and emits Drained."""
        request_id, epoch = self.id
        self._node.abort(self.peer.worker_id, Abort(request_id=request_id, epoch=epoch, code=code, reason=reason))

    def _send_ready(self, now: float) -> None:
        """Queue what is computed and granted; then Fin."""
        if self._grant is None or self.is_sent:
            return
        for chunk in self._chunks:
            self._send_chunk(chunk, self._grant)
        self._chunks.clear()
        if self._token is not None:
            self._send_fin(self._token, now)

    def _send_chunk(self, chunk: ChunkDone, grant: Grant) -> None:
        """Send the part of a chunk that the peer has pages for, of each group of layers that it takes."""
        end = chunk.first_token + chunk.num_tokens
        for group, skip in zip(self._groups, grant.skips(), strict=True):
            first, pages = self._from(chunk, group, skip)
            if not pages:
                continue
            sums = chunk.checksums.wait()[-len(pages) :] if chunk.checksums else None
            place = (self._num_sent, first, end - first)
            self._node.send_chunk(self.peer.worker_id, *self.id, *place, pages, sums, group=group, loss=chunk.loss)
            self._num_sent += 1

    def _from(self, chunk: ChunkDone | ChunkScheduled, group: int, skip_tokens: int) -> tuple[int, list[BlockId]]:
        """Return the first token of a chunk that is not skipped, and one group's pages from there on.

        `skip_tokens` and chunk starts are multiples of the block size.
        """
        first = max(chunk.first_token, skip_tokens)
        blocks = chunk.blocks[(first - chunk.first_token) // self._layout.block_size :]
        return first, self._page_tables.pages(group, blocks) if blocks else []

    def _send_fin(self, token: Token, now: float) -> None:
        request_id, epoch = self.id
        cached_tokens = self.attempt.cached_tokens
        fin = Fin(request_id, epoch, self._num_sent, token, cached_tokens, self._num_told, self._drawn)
        self._node.finish(self.peer.worker_id, fin)
        self.sent_s = now


class OutgoingOwner(Protocol):
    """The role that sends: it decides what becomes of a request whose handoff goes on or ends."""

    def on_granted(self, handoff: OutgoingHandoff) -> None: ...

    def on_waiting(self, handoff: OutgoingHandoff) -> None:
        """Handle a peer that has no pages yet and will grant some later."""
        ...

    def on_committed(self, handoff: OutgoingHandoff, now: float) -> None:
        """Handle a handoff that the peer has whole; nothing reads its pages any more."""
        ...

    def on_failed(self, handoff: OutgoingHandoff, error: TandemError | None) -> None:
        """Handle a handoff that ended without Commit; `on_unread` follows.

        `error` is None if the peer reports the end of the request.
        """
        ...

    def on_unread(self, handoff: OutgoingHandoff) -> None:
        """Handle the end of the last reader of the pages, after `on_failed` or `OutgoingHandoffs.abort`."""
        ...


class OutgoingHandoffs:
    """The handoffs that one role sends, each until its Commit or the end of its last reader."""

    def __init__(
        self,
        owner: OutgoingOwner,
        node: TransferNode,
        layout: KVLayout,
        page_tables: KVGroups,
        attempts: AttemptTable,
    ) -> None:
        self._owner = owner
        self._node = node
        self._layout, self._page_tables = layout, page_tables
        self._attempts = attempts
        self._open: dict[AttemptId, OutgoingHandoff] = {}
        self._draining: dict[AttemptId, OutgoingHandoff] = {}

    def begin(self, attempt: Attempt, peer: WorkerRef, num_tokens: int, is_bound: bool = False) -> OutgoingHandoff:
        """Return a new handoff of the attempt's first `num_tokens` tokens, which is not offered yet.

        `is_bound`: of so many at most.
        """
        handoff = OutgoingHandoff(attempt, peer, num_tokens, self._node, self._layout, self._page_tables, is_bound)
        self._open[attempt.id] = handoff
        return handoff

    def get(self, attempt: Attempt | None) -> OutgoingHandoff | None:
        """Return the attempt's handoff, unless there is none or it has ended."""
        return self._open.get(attempt.id) if attempt is not None else None

    def __iter__(self) -> Iterator[OutgoingHandoff]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_idle(self) -> bool:
        """Return whether no handoff is open and no page may still be read."""
        return not self._open and not self._draining

    def abort(self, handoff: OutgoingHandoff, code: str, reason: str) -> None:
        """End a handoff here and at the peer; `on_unread` follows, at once if nothing was offered."""
        del self._open[handoff.id]
        if handoff.is_offered:
            self._draining[handoff.id] = handoff
            handoff.abort(code, reason)
        else:
            self._owner.on_unread(handoff)

    def recall(self, handoff: OutgoingHandoff, code: str, reason: str) -> None:
        """End a handoff whose sequence goes on here with its pages; nothing follows."""
        del self._open[handoff.id]
        handoff.abort(code, reason)

    def on_transfer(self, event: TransferEvent, now: float) -> None:
        """Handle an event of the node; those that belong to no handoff of this half are passed over."""
        match event:
            case MessageReceived(message=Grant() as grant):
                self._on_grant(grant, now)
            case MessageReceived(message=Wait() as wait):
                if handoff := self._open.get((wait.request_id, wait.epoch)):
                    self._owner.on_waiting(handoff)
            case MessageReceived(message=Refuse() as refuse):
                if handoff := self._open.get((refuse.request_id, refuse.epoch)):
                    self._fail(handoff, Unavailable(f"decode refused: {refuse.reason}"))
            case MessageReceived(message=Commit() as commit):
                self._on_commit(commit, now)
            case MessageReceived(message=Abort() as abort):
                self._on_abort(abort)
            case Drained(request_id, epoch):
                self._on_drained((request_id, epoch))
            case PeerDisconnected():
                self._on_peer_lost(event)
            case _:
                pass

    def _on_grant(self, grant: Grant, now: float) -> None:
        handoff = self._open.get((grant.request_id, grant.epoch))
        if handoff is None or handoff.is_granted:
            self._attempts.num_stale += 1
            return
        try:
            handoff.on_grant(grant, now)
        except Corrupt as error:
            self._fail(handoff, error)
            return
        self._owner.on_granted(handoff)

    def _on_commit(self, commit: Commit, now: float) -> None:
        handoff = self._open.get((commit.request_id, commit.epoch))
        if handoff is None:
            self._attempts.num_stale += 1
            return
        try:
            handoff.check_commit(commit)
        except Corrupt as error:
            self._fail(handoff, error)
            return
        del self._open[handoff.id]
        self._owner.on_committed(handoff, now)

    def _fail(self, handoff: OutgoingHandoff, error: TandemError) -> None:
        self._owner.on_failed(handoff, error)
        self.abort(handoff, error.code, str(error))

    def _on_abort(self, abort: Abort) -> None:
        """End a handoff that the peer has ended; the node drains it by itself and emits Drained."""
        handoff = self._open.pop((abort.request_id, abort.epoch), None)
        if handoff is not None:
            self._draining[handoff.id] = handoff
            self._owner.on_failed(handoff, None)

    def _on_drained(self, attempt_id: AttemptId) -> None:
        handoff = self._draining.pop(attempt_id, None)
        if handoff is not None:
            self._owner.on_unread(handoff)

    def _on_peer_lost(self, lost: PeerDisconnected) -> None:
        for handoff in [each for each in self._draining.values() if each.was_lost_with(lost)]:
            self._on_drained(handoff.id)
        for handoff in [each for each in self._open.values() if each.was_lost_with(lost)]:
            del self._open[handoff.id]
            error = PeerLost(f"the handoff to decode worker {lost.peer_id} failed: {lost.error}")
            self._owner.on_failed(handoff, None if handoff.is_sent else error)
            self._owner.on_unread(handoff)
