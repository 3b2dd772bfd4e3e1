"""A worker's place in the exchange of KV pages: one node per engine core, links to any number of peers, both ways."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from contracts.errors import Overloaded, TransferError
from contracts.handoff import Abort, ChunkHeader, Commit, Fin, Grant, Offer, Refuse, Wait
from contracts.ids import BlockId, Epoch, Incarnation, RequestId, WorkerId
from contracts.layout import KVLayout
from contracts.node import TransferCapabilities
from contracts.request import WorkerRef
from kv_transfer.chunks import chunk_plan as plan
from kv_transfer.chunks.device_pool import DevicePool
from kv_transfer.chunks.page_pool import PagePool
from kv_transfer.connection import handshake
from kv_transfer.connection import layout_negotiation as conversion
from kv_transfer.connection.capabilities import ways_of
from kv_transfer.connection.frames import Hello
from kv_transfer.connection.handshake import Identity
from kv_transfer.connection.handshake_socket import HandshakeSocket
from kv_transfer.connection.listener import Listener
from kv_transfer.events import Drained, LinkStats, PeerDisconnected, TransferEvent
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
from kv_transfer.warm_path import Rehearsal

BUSY_S = 0.03
"""The owner's next batch follows the last one sooner, if there is one."""


class TransferNode:
    """Sends pages of our pool to decode workers and lands pages from prefill workers. No method but `close` blocks.

    `pool`: uint8 `[num_planes, num_blocks, page_nbytes]`, C-contiguous, shared with the engine; or a device's. `wake()`
    is called from transfer threads when `poll()` has something. `transports`: ready ones that stand in for those of
    the same name. Raises ConfigError if it can't listen or lacks the transport that is asked for, ValueError if the
    pool does not fit the layout.
    """

    def __init__(
        self,
        settings: TransferSettings,
        me: WorkerId,
        incarnation: Incarnation,
        layout: KVLayout,
        pool: np.ndarray | DevicePool,
        wake: Callable[[], None],
        transports: Mapping[str, Transport] | None = None,
    ) -> None:
        self._layout, self._wake, self._settings = layout, wake, settings
        own: dict[str, Transport] = {}
        device: DevicePool | None = None
        if isinstance(pool, np.ndarray):
            self._pool, memory, plane_scales = PagePool(pool, layout), "host", []
        else:
            self._pool, memory, plane_scales = pool, pool.kind, pool.scales
            pool.expect(conversion.part_counts(layout))
            pool.checks, own["nvlink"] = settings.checksum, NvlinkTransport(pool)
            device = pool
        self._transports = Transports({**own, **(transports or {})}, device)
        require_available(settings.transport, self._transports)
        self._events: deque[TransferEvent] = deque()
        self._table = LinkTable()
        self._closing, self._launched_s = False, -math.inf
        self._interfaces, self._broken = InterfaceWatch(), ""
        self._paths = PathHealth(time.monotonic)
        identity = Identity(me, incarnation, settings.secret)
        self._parts = LinkParts(
            settings=settings,
            identity=identity,
            layout=layout,
            pool=self._pool,
            memory=memory,
            plane_scales=plane_scales,
            transports=self._transports,
            emit=self._emit,
            note=self._note,
            wake=wake,
            is_busy=self._is_busy,
            paths=self._paths,
            keep_warm=self.keep_warm,
            on_proved=self._on_proved,
            on_lost=self._on_lost,
        )
        self._rehearsal = Rehearsal(self._parts)
        self._listener = Listener(settings, identity, self._on_peer)

    @property
    def address(self) -> str:
        """`host:port` of the control listener, as peers are told it."""
        host = self._settings.advertise_host or self._settings.host
        return f"[{host}]:{self._listener.port}" if ":" in host else f"{host}:{self._listener.port}"

    @property
    def ways(self) -> TransferCapabilities:
        """How pages may leave and come, to be told to others before they connect."""
        return ways_of(self._parts.terms)

    def start(self) -> None:
        self._listener.start()

    def close(self) -> None:
        """End every link, thread and socket. Blocks for as long as the fences take; no PeerDisconnected follows.
        Idempotent.
        """
        with self._table.lock:
            if self._closing:
                return
            self._closing = True
        self._listener.stop()
        links = self._table.alive()
        for link in links:
            link.fail("this worker is closing", "closed")
        for link in links:
            link.gone.wait()
        self._listener.join()
        self._transports.close()

    def poll(self) -> list[TransferEvent]:
        """What has happened since the last call, in order."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def stats(self) -> list[LinkStats]:
        return [link.stats() for link in self._table.in_place()]

    @property
    def transfer_rate(self) -> float:
        """Bytes a second that a finished handoff to a peer saw lately, the mean over the peers; 0.0 while unknown.

        Peer by peer it is `nbytes_per_s` in `stats`.
        """
        rates = [link.nbytes_per_s for link in self.stats() if link.nbytes_per_s > 0]
        return sum(rates) / len(rates) if rates else 0.0

    def keep_warm(self) -> bool:
        """By whoever waits for a lone handoff without sleep, again and again: see rehearsal. Whether it was due."""
        return self._rehearsal.keep_warm()

    @property
    def bad_paths(self) -> tuple[Incarnation, ...]:
        """Peers that handoffs from here do not reach lately: no connection, or it was lost, or pages came broken."""
        return self._paths.bad()

    @property
    def broken(self) -> str:
        """Why no handoff can come about before this process starts anew, in words; empty if that is not so."""
        return self._broken

    # The prefill side.

    def meet(self, peers: Sequence[WorkerRef]) -> None:
        """Open links to these, so that the first handoff finds them up; by the thread that offers.

        Left alone are those that a link goes to already, if only to a former incarnation, and bad paths. A link that
        fails is a PeerDisconnected, of no attempt.
        """
        bad = self._paths.bad()
        for peer in peers:
            if self._table.outgoing(peer.worker_id) is None and peer.incarnation not in bad:
                self._outgoing_to(peer, was_asked=False)

    def offer(self, peer: WorkerRef, offer: Offer) -> None:
        """Connects if nobody has. If that fails, PeerDisconnected says why; its incarnation is the one in `peer`."""
        if link := self._outgoing_to(peer, was_asked=True):
            link.offer(offer)

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
    ) -> None:
        """Queue the pages of tokens `[first_token, first_token + num_tokens)`; they must not change until Commit,
        Drained or PeerDisconnected.

        The caller clips to the tokens from Grant's `skip_tokens` on. `first_token` and, but for the last chunk, the
        end are
        multiples of the block size. `checksums`: of a device's pages, what device.DevicePool.in_parts takes. Dropped if
        the attempt is over. Raises ValueError if pages and tokens do not fit.
        """
        plan.check_pages(src_pages, self._pool.num_blocks)
        if (
            num_tokens <= 0
            or first_token % self._layout.block_size
            or len(src_pages) != self._layout.num_blocks(num_tokens)
        ):
            raise ValueError(f"{len(src_pages)} pages do not fit {num_tokens} tokens from {first_token} on")
        nbytes = plan.chunk_nbytes(self._layout, num_tokens)
        header = ChunkHeader(request_id, epoch, index, first_token, num_tokens, self._layout.layout_id, nbytes, 0)
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
    ) -> None:
        """This chunk is about to be computed, and is told by `send_chunk` once it is. Where decode fetches it, its
        device may be made to wait for it: from now on the pages must not change, as there. `early_planes`: as many as
        are there when `launched` is told of them.
        """
        if link := self._table.outgoing(peer_id):
            link.chunk_scheduled((request_id, epoch), first_token, num_tokens, src_pages, early_planes)

    def is_fetched_by(self, peer_id: WorkerId) -> bool:
        """Decode is told of chunks there, and fetches them: no thread of ours sends any."""
        link = self._table.outgoing(peer_id)
        return link is not None and link.is_fetched

    def chunks_launched(self, is_all: bool) -> None:
        """By the thread that called `coming`: the device has these chunks now, on the thread's current stream, or
        never will; or unless `is_all`, it has their early planes. Called for batches without chunks too.
        """
        self._launched_s = time.monotonic()
        for link in self._table.in_place():
            if isinstance(link, OutgoingLink):
                link.chunks_launched(is_all)

    def rested(self) -> None:
        """By the same thread: it has nothing to compute, whatever it launched a moment ago."""
        self._launched_s = -math.inf

    def finish(self, peer_id: WorkerId, fin: Fin) -> None:
        """Goes after the chunks that are queued."""
        if link := self._table.outgoing(peer_id):
            link.finish(fin)

    # The decode side.

    def grant(self, peer_id: WorkerId, grant: Grant) -> None:
        """From now on chunks of this attempt may land on exactly these pages. Ignored if the offer is gone with its
        link.

        Raises ValueError if the pages do not fit the offer, are outside the pool, repeat, or are landing for another
        attempt.
        """
        if link := self._table.incoming(peer_id):
            link.grant(grant)

    def wait(self, peer_id: WorkerId, message: Wait) -> None:
        if link := self._table.incoming(peer_id):
            link.send(message)

    def refuse(self, peer_id: WorkerId, message: Refuse) -> None:
        if link := self._table.incoming(peer_id):
            link.grants.end((message.request_id, message.epoch))
            link.send(message)

    def commit(self, peer_id: WorkerId, message: Commit) -> None:
        """All chunks have landed: ends the landing, without Drained."""
        if link := self._table.incoming(peer_id):
            link.commit(message)

    # Both sides.

    def abort(self, peer_id: WorkerId, abort: Abort) -> None:
        """End the attempt here and tell the peer, which answers AbortAck. Drained follows here, for unknown attempts
        too.

        An Abort from the peer does the same: after its Message this node drains by itself, answers, and Drained
        follows.
        """
        key = abort.request_id, abort.epoch
        link = self._table.having(peer_id, key)
        if link is None:
            self._emit(Drained(*key))
            return
        link.end(key)  # first: prefill may give pages to others as soon as it hears that decode wants them no more
        link.send(abort)

    def knows(self, peer_id: WorkerId, request_id: RequestId, epoch: Epoch) -> bool:
        """A link has this attempt. A PeerDisconnected that is polled then is of a former link: it was noted before the
        offer was made.
        """
        return self._table.having(peer_id, (request_id, epoch)) is not None

    def _outgoing_to(self, peer: WorkerRef, was_asked: bool) -> OutgoingLink | None:
        """None if a link with this very incarnation has failed: PeerDisconnected is to come, and would end a new one
        too.

        Beside a link to another incarnation a new one is begun aside: which is the former one is not known before it
        has proved itself, since an offer may be late. Each knows at once that it `was_asked` for: it may fail before it
        hears of the request.
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
        """In the thread of a peer that has proved itself."""
        link = IncomingLink(self._parts, hello)
        try:
            self._adopt(link)
        except Overloaded as error:
            handshake.reject(wire, error)
            wire.sock.close()
            return
        link.run(wire, self._listener.attachments.take)

    def _adopt(self, link: IncomingLink) -> None:
        """A new connection ends the one before it from the same worker, and begins when that is fenced, with all that
        fails beside it: the PeerDisconnected that follows would be the new one's, too.
        """
        with self._table.lock:
            former = self._table.placed.get((link.peer_id, False))
        if former is not None:
            former.fail("replaced by a new connection")
            former.gone.wait(self._settings.handshake_timeout_s)
        with self._table.lock:
            failed = [other for other in self._table.alive_with(link.peer_id, link.incarnation) if other.failed]
        for other in failed:
            other.gone.wait(self._settings.handshake_timeout_s)
        with self._table.lock:
            if self._closing:
                raise Overloaded("this worker is closing")
            self._table.place(link, self._settings.max_peers)

    def _on_proved(self, link: Link) -> None:
        """The worker is this incarnation now: a link that was begun aside takes the place of one to a former."""
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
        """PeerDisconnected speaks for both directions, so it waits until the other one is fenced too, and says so only
        if both are. It is noted before a new link can be made: whatever comes over that one is heard behind it.
        """
        with self._table.lock:
            if isinstance(link, OutgoingLink):
                self._paths.failed(link.incarnation, link.was_asked)
            if not event.fenced:
                self._table.unfenced.append(link)
            if self._settings.transport == "ucx" and event.code == TransferError.code:
                self._judge_interfaces()
            self._table.drop(link)
            others = self._table.alive_with(link.peer_id, link.incarnation)
            is_last = not others and not self._closing
            if is_last:
                unfenced = self._table.take_unfenced(link.peer_id, link.incarnation)
                self._note(replace(event, fenced=not unfenced))
            for other in others:  # now, so that nobody takes them for sound
                other.fail(event.error, event.code)
        if is_last:
            self._wake()

    def _judge_interfaces(self) -> None:
        """Under the lock, after a handshake in which two ends that heard each other found no way by UCX."""
        if names := self._interfaces.replaced():
            self._broken = f"UCX uses the network interfaces of its start, and {', '.join(names)} came since"

    def _is_busy(self) -> bool:
        return time.monotonic() - self._launched_s < BUSY_S

    def _emit(self, event: TransferEvent) -> None:
        self._note(event)
        self._wake()

    def _note(self, event: TransferEvent) -> None:
        self._events.append(event)
