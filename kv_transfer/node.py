"""The KV transfer endpoint of a worker: one node per engine core, with links to any number of peers."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from contracts.errors import Overloaded, TransferError
from contracts.handoff import Abort, ChunkHeader, Commit, Fin, Grant, Offer, PrefixRequest, Refuse, Wait
from contracts.ids import BlockId, Epoch, Incarnation, RequestId, WorkerId
from contracts.kv_loss import EXACT
from contracts.layout import KVLayout
from contracts.node import TransferCapabilities
from contracts.request import WorkerRef
from kv_transfer.chunks import chunk_plan as plan
from kv_transfer.chunks.device_pool import DevicePool
from kv_transfer.connection.handshake import Identity, reject
from kv_transfer.connection.handshake_frames import Hello
from kv_transfer.connection.handshake_socket import HandshakeSocket
from kv_transfer.connection.listener import Listener
from kv_transfer.connection.transport_choice import capabilities_of
from kv_transfer.events import Drained, LinkStats, PeerDisconnected, TransferEvent
from kv_transfer.links.group_pools import prepared_pools
from kv_transfer.links.incoming_link import IncomingLink
from kv_transfer.links.interface_watch import InterfaceWatch
from kv_transfer.links.link import Link, LinkParts
from kv_transfer.links.link_table import LinkTable
from kv_transfer.links.outgoing_link import OutgoingLink
from kv_transfer.links.path_health import PathHealth
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.base import Transport
from kv_transfer.transports.nvlink import NvlinkTransport
from kv_transfer.transports.registry import Transports, require_available

BUSY_S = 0.03
"""How long after a launch the owner counts as busy, in seconds: its next batch, if there is one, starts sooner."""


class TransferNode:
    """The endpoint that sends pages to decode workers and receives pages from prefill workers.

    No method but `close` blocks. `pool`: uint8 `[num_planes, num_blocks, page_nbytes]`, C-contiguous, shared with the
    engine; or a device's; or those of all the layout's groups. `wake()` is called from transfer threads when `poll()`
    has something. `transports`: ready ones that replace those of the same name.

    Raises ConfigError if it can't listen or lacks the requested transport, ValueError if pool and layout do not fit.
    """

    def __init__(
        self,
        settings: TransferSettings,
        me: WorkerId,
        incarnation: Incarnation,
        layout: KVLayout,
        pool: np.ndarray | DevicePool | Sequence[np.ndarray | DevicePool],
        wake: Callable[[], None],
        transports: Mapping[str, Transport] | None = None,
    ) -> None:
        self._layout, self._wake, self._settings = layout, wake, settings
        own: dict[str, Transport] = {}
        self._pools, device = prepared_pools(pool if isinstance(pool, Sequence) else [pool], layout, settings.checksum)
        memory = "host"
        if device:
            memory, own["nvlink"] = device[0].kind, NvlinkTransport(device)
        self._transports = Transports({**own, **(transports or {})}, device)
        require_available(settings.transport, self._transports)
        self._events: deque[TransferEvent] = deque()
        self._table, self._closing, self._launched_s = LinkTable(), False, -math.inf
        self._interfaces, self._paths = InterfaceWatch(), PathHealth(time.monotonic)
        self._parts = LinkParts(
            settings=settings,
            identity=(identity := Identity(me, incarnation, settings.secret)),
            layout=layout,
            pools=self._pools,
            memory=memory,
            plane_scales=[scale for each in device for scale in each.scales],
            transports=self._transports,
            emit=self._emit,
            note=self._note,
            wake=wake,
            is_busy=self._is_busy,
            paths=self._paths,
            on_proved=self._on_proved,
            on_lost=self._on_lost,
        )
        self._listener = Listener(settings, identity, self._on_peer)

    @property
    def address(self) -> str:
        """Return the `host:port` of the control listener that peers are given."""
        host = self._settings.advertise_host or self._settings.host
        return f"[{host}]:{self._listener.port}" if ":" in host else f"{host}:{self._listener.port}"

    @property
    def capabilities(self) -> TransferCapabilities:
        """Return how pages may be sent and received, to be published before workers connect."""
        return capabilities_of(self._parts.terms)

    @property
    def checks_chunks(self) -> bool:
        """Return whether this worker asks for checksums; whether a chunk was compared says its `loss`."""
        return self._settings.checksum

    def start(self) -> None:
        self._listener.start()

    def close(self) -> None:
        """End every link, thread and socket; return when all are fenced. No event follows. Idempotent."""
        with self._table.lock:
            if self._closing:
                return
            self._closing = True
        self._listener.stop()
        for link in (links := self._table.alive()):
            link.fail("this worker is closing", "closed")
        for link in links:
            link.gone.wait()
        self._listener.join()
        self._transports.close()

    def poll(self) -> list[TransferEvent]:
        """Return the events since the last call, in order."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def stats(self) -> list[LinkStats]:
        return [link.stats() for link in self._table.in_place()]

    @property
    def transfer_rate(self) -> float:
        """Return the mean `nbytes_per_s` of `stats` over the peers where it is known; 0.0 if it never is."""
        rates = [link.nbytes_per_s for link in self.stats() if link.nbytes_per_s > 0]
        return sum(rates) / len(rates) if rates else 0.0

    @property
    def bad_paths(self) -> tuple[Incarnation, ...]:
        """Return the peers that handoffs lately fail to reach: no connection, a lost one, or corrupt pages."""
        return self._paths.bad()

    @property
    def broken(self) -> str:
        """Return why no handoff can succeed until this process is restarted; empty if there is no such reason."""
        return self._interfaces.broken

    # The prefill side.

    def meet(self, peers: Sequence[WorkerRef]) -> None:
        """Open links to these peers ahead of their first handoff. Call it from the thread that offers.

        Skipped are bad paths, and peers to which there is a link already, even if it is to a former incarnation. A link
        that fails is reported as a PeerDisconnected that belongs to no attempt.
        """
        bad = self.bad_paths
        for peer in peers:
            if self._table.outgoing(peer.worker_id) is None and peer.incarnation not in bad:
                self._outgoing_to(peer, was_asked=False)

    def offer(self, peer: WorkerRef, offer: Offer) -> None:
        """Send the offer, connecting if there is no link; PeerDisconnected reports a failure to connect."""
        if link := self._outgoing_to(peer, was_asked=True):
            link.offer(offer)

    def lower_offer(self, peer_id: WorkerId, offer: Offer) -> None:
        """Say that fewer tokens than were offered will come; nothing is sent of an attempt that is over."""
        if link := self._table.outgoing(peer_id):
            link.lower(offer)

    def ensure_link(self, peer: WorkerRef) -> bool:
        """Open the link if it is missing, unless it is beyond half of `max_peers`; return whether it is up."""
        self.meet([peer] if self._table.has_room_for(peer.worker_id, self._settings.max_peers // 2) else [])
        return self._table.is_up(peer.worker_id, peer.incarnation)

    def request_prefix(self, peer: WorkerRef, request: PrefixRequest) -> None:
        """Ask a peer for blocks: Offer, Refuse or PeerDisconnected answers."""
        if link := self._outgoing_to(peer, True):
            link.send(request)

    def send_chunk(
        self,
        peer_id: WorkerId,
        request_id: RequestId,
        epoch: Epoch,
        index: int,
        first_token: int,
        num_tokens: int,
        src_pages: Sequence[BlockId],
        checksums: np.ndarray | None = None,
        group: int = 0,
        loss: str = EXACT,
    ) -> None:
        """Queue the pages of tokens `[first_token, first_token + num_tokens)` in one group of the layout.

        The pages must not change until Commit, Drained or PeerDisconnected. Tokens before Grant's `skip_tokens` are
        left out. `first_token` and, except in the last chunk, the end are multiples of the block size. `checksums`: for
        a device's pages, what DevicePool.in_parts takes. `loss`: see contracts.kv_loss. The chunk is dropped if the
        attempt is over. Raises ValueError if pages and tokens do not fit.
        """
        plan.check_chunk(self._layout, group, first_token, num_tokens, src_pages)
        plan.check_pages(src_pages, self._pools[group].num_blocks)
        nbytes, layout_id = plan.chunk_nbytes(self._layout, num_tokens, group), self._layout.layout_id
        header = ChunkHeader(request_id, epoch, index, first_token, num_tokens, layout_id, nbytes, 0, group, loss)
        if link := self._table.outgoing(peer_id):
            link.send_chunk(header, src_pages, checksums)

    def chunk_scheduled(
        self,
        peer_id: WorkerId,
        request_id: RequestId,
        epoch: Epoch,
        first_token: int,
        num_tokens: int,
        src_pages: Sequence[BlockId],
        early_planes: int,
        group: int = 0,
    ) -> None:
        """Announce a chunk that is about to be computed; `send_chunk` follows once it is.

        If decode fetches the chunk, its device may wait for it: as with `send_chunk`, the pages must not change from
        now on. `early_planes`: how many of the planes are ready when `chunks_launched(is_all=False)` is called.
        """
        if link := self._table.outgoing(peer_id):
            link.chunk_scheduled((request_id, epoch), first_token, num_tokens, src_pages, early_planes, group)

    def chunks_launched(self, is_all: bool) -> None:
        """Report that the announced chunks are on the thread's current stream, or never will be.

        Unless `is_all`, this holds for their early planes only. Called by the thread that called `chunk_scheduled`, for
        batches without chunks too.
        """
        self._launched_s = time.monotonic()
        for link in [each for each in self._table.in_place() if isinstance(each, OutgoingLink)]:
            link.chunks_launched(is_all)

    def rested(self) -> None:
        """Report that the engine's thread has nothing to compute, whatever it launched a moment ago."""
        self._launched_s = -math.inf

    def finish(self, peer_id: WorkerId, fin: Fin) -> None:
        """Send Fin after the queued chunks."""
        if link := self._table.outgoing(peer_id):
            link.finish(fin)

    def has_queued(self, peer_id: WorkerId, request_id: RequestId, epoch: Epoch) -> bool:
        """Return whether a chunk of the attempt waits to be sent, or is being sent."""
        link = self._table.outgoing(peer_id)
        return link is not None and link.has_queued((request_id, epoch))

    # The decode side.

    def grant(self, peer_id: WorkerId, grant: Grant) -> None:
        """Allow chunks of this attempt to be written to exactly these pages from now on.

        Ignored if the offer was lost with its link. Raises ValueError if the pages do not fit the offer, are outside
        the pool, repeat, or are granted to another attempt. There is a table for each of `groups_with` this peer.
        """
        if link := self._table.incoming(peer_id):
            link.grant(grant)

    def loss_from(self, peer_id: WorkerId) -> str:
        """Return the loss of KV that this worker and the peer allow between them, see contracts.kv_loss."""
        return link.accepted_loss if (link := self._table.incoming(peer_id)) else EXACT

    def wait(self, peer_id: WorkerId, message: Wait) -> None:
        if link := self._table.incoming(peer_id):
            link.send(message)

    def refuse(self, peer_id: WorkerId, message: Refuse) -> None:
        if link := self._table.incoming(peer_id):
            link.grants.end((message.request_id, message.epoch))
            link.send(message)

    def commit(self, peer_id: WorkerId, message: Commit) -> bool:
        """End an attempt whose chunks have arrived; return whether nothing writes to its pages any more.

        Of a peer that sends more than it said, something may: then Drained or PeerDisconnected follows.
        """
        link = self._table.incoming(peer_id)
        return link is not None and link.commit(message)

    # Both sides.

    def groups_with(self, peer_id: WorkerId, sends: bool) -> Sequence[int]:
        """Return the groups that its chunks number; known from Grant or Offer on."""
        link = self._table.outgoing(peer_id) if sends else self._table.incoming(peer_id)
        return link.groups if link else range(len(self._pools))

    def abort(self, peer_id: WorkerId, abort: Abort) -> None:
        """End the attempt here and at the peer, which answers AbortAck.

        Drained follows here, for unknown attempts too. An Abort from the peer has the same effect: after its
        MessageReceived this node drains by itself, answers, and Drained follows.
        """
        key = abort.request_id, abort.epoch
        if link := self._table.having(peer_id, key):
            link.end(key)  # first: on the Abort prefill may give its pages to other requests
            link.send(abort)
        else:
            self._emit(Drained(request_id=abort.request_id, epoch=abort.epoch))

    def knows(self, peer_id: WorkerId, request_id: RequestId, epoch: Epoch) -> bool:
        """Return whether a link has this attempt; a PeerDisconnected polled then is of a former link."""
        return self._table.having(peer_id, (request_id, epoch)) is not None

    def _outgoing_to(self, peer: WorkerRef, was_asked: bool) -> OutgoingLink | None:
        """Return the link to this peer, making one if there is none, or None if one to it has failed.

        In the latter case a PeerDisconnected for this incarnation is under way, which would end a new link too. If
        there is a link to another incarnation, the new one waits in `aside`: an offer may be late, so which incarnation
        is the former one is not known before the new link has proved itself. `was_asked` is recorded on the link at
        once, since it may fail before it gets the request.
        """
        with self._table.lock:
            links = self._table.alive_with(peer.worker_id, peer.incarnation)
            outgoing = [link for link in links if isinstance(link, OutgoingLink)]
            for link in outgoing:
                link.was_asked = link.was_asked or was_asked
            if any(link.failed for link in links):
                return None
            if outgoing:
                return outgoing[0]
            fresh = OutgoingLink(self._parts, peer, was_asked)
            if self._table.placed.setdefault((peer.worker_id, True), fresh) is not fresh:
                self._table.aside.append(fresh)
        fresh.start()
        return fresh

    def _on_peer(self, wire: HandshakeSocket, hello: Hello) -> None:
        """Serve the link of a peer that has proved itself, in that peer's thread."""
        link = IncomingLink(self._parts, hello)
        try:
            self._adopt(link)
        except Overloaded as error:
            reject(wire, error)
            wire.sock.close()
            return
        link.run(wire, self._listener.attachments.take)

    def _adopt(self, link: IncomingLink) -> None:
        """Put a new incoming link in its place once the former one from the same worker is fenced.

        It also waits for any other failed link with that worker: the PeerDisconnected that follows would otherwise end
        the new link's attempts too.
        """
        former = self._table.incoming(link.peer_id)
        if former is not None:
            former.fail("replaced by a new connection")
            former.gone.wait(self._settings.handshake_timeout_s)
        for other in self._table.failed_with(link.peer_id, link.incarnation):
            other.gone.wait(self._settings.handshake_timeout_s)
        with self._table.lock:
            if self._closing:
                raise Overloaded("this worker is closing")
            self._table.place(link, self._settings.max_peers)

    def _on_proved(self, link: Link) -> None:
        """Move a link that waited in `aside` to the place of one to a former incarnation."""
        with self._table.lock:
            if link.failed or link not in self._table.aside:
                return
            self._table.aside.remove(link)
            former = self._table.placed.get((link.peer_id, True))
            self._table.placed[link.peer_id, True] = link
            if former is not None:
                self._table.aside.append(former)
                former.fail("replaced by a new connection")

    def _on_lost(self, link: Link, event: PeerDisconnected) -> None:
        """Remove a lost link, and queue PeerDisconnected once both directions are fenced.

        `fenced` holds only if it does for both. The event is queued before a new link can be made, so that messages of
        that one come after it.
        """
        with self._table.lock:
            if isinstance(link, OutgoingLink):
                self._paths.failed(link.incarnation, link.was_asked)
            if not event.fenced:
                self._table.unfenced.append(link)
            if self._settings.transport == "ucx" and event.code == TransferError.code:
                self._interfaces.judge()
            self._table.drop(link)
            others = self._table.alive_with(link.peer_id, link.incarnation)
            is_last = not others and not self._closing
            if is_last:
                self._note(replace(event, fenced=not self._table.take_unfenced(link.peer_id, link.incarnation)))
            for other in others if not link.is_untried else ():  # now, so that no call uses them
                other.fail(event.error, event.code)
        if is_last:
            self._wake()

    def _is_busy(self) -> bool:
        return time.monotonic() - self._launched_s < BUSY_S

    def _emit(self, event: TransferEvent) -> None:
        self._note(event)
        self._wake()

    def _note(self, event: TransferEvent) -> None:
        self._events.append(event)
