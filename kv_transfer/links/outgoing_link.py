"""The prefill end of a link: it connects, then sends the chunks that it is given."""

import socket
import struct
import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from contracts.errors import Corrupt, PeerLost, TransferError
from contracts.handoff import (
    Abort,
    AbortAck,
    ChunkHeader,
    Commit,
    Fetched,
    Fin,
    Grant,
    HandoffMessage,
    Offer,
    PullReady,
    Refuse,
    Wait,
)
from contracts.ids import BlockId
from contracts.layout import KVLayout
from contracts.request import WorkerRef
from kv_transfer.chunks import checksum as integrity
from kv_transfer.chunks import chunk_plan as plan
from kv_transfer.connection import handshake
from kv_transfer.connection import layout_negotiation as conversion
from kv_transfer.connection.handshake_socket import Deadline, HandshakeSocket
from kv_transfer.connection.transport_choice import candidates, common_levels
from kv_transfer.data_path.compression import Compressor, SegmentCodec
from kv_transfer.data_path.pull_sender import PullSender
from kv_transfer.data_path.sender import ChunkJob, FinJob, Key, Sender, SendQueue, check_sendable
from kv_transfer.data_path.staging import sender_stagings
from kv_transfer.links.handoff_rate import HandoffRate
from kv_transfer.links.link import Link, LinkParts
from kv_transfer.transports.nvlink import SharedPool
from kv_transfer.transports.tcp import TcpOutbound

AT_ONCE = struct.pack("ii", 1, 0)
"""The SO_LINGER option with which a closed socket drops its unsent data.

The end of the connection is sent at once then, and not when the peer has room for that data.
"""


class OutgoingLink(Link):
    """The prefill end of a link."""

    outgoing = True
    receives = (Grant, Wait, Refuse, Fetched, Commit, Abort, AbortAck)

    def __init__(self, parts: LinkParts, peer: WorkerRef, was_asked: bool) -> None:
        self.queue, self._peer, self._rate = SendQueue(), peer, HandoffRate()
        self._pull_sender: PullSender | None = None
        self.was_asked = was_asked  # whether a request needs it; guarded by the node's lock
        self._num_parts = parts.layout.tp_size
        self._other_layout: KVLayout | None = None
        super().__init__(parts, peer.worker_id, peer.incarnation, self.queue)
        self.thread = threading.Thread(
            target=self._run_to_the_end, args=(self._connect_and_serve,), name=f"kv-link-{peer.worker_id}", daemon=True
        )

    def start(self) -> None:
        """Connect in a thread of its own. If no thread can be started, the link is lost like any other."""
        try:
            self.thread.start()
        except RuntimeError as error:
            self.fail(f"can't connect to {self.peer_id}: {error}")
            self._finish()

    def offer(self, offer: Offer) -> None:
        """Begin an attempt."""
        key = offer.request_id, offer.epoch
        self.queue.begin(key)
        self._rate.begin(key)
        is_known = not offer.is_bound and offer.num_ready is None
        if self._pull_sender is not None and is_known:  # else nobody knows how much is left to compute, or to load
            self._pull_sender.begin(key, offer.num_tokens)
        rate = self._rate.nbytes_per_s if self._pull_sender is None else 0.0
        self.send(msgspec.structs.replace(offer, nbytes_per_s=rate))

    def lower(self, offer: Offer) -> None:
        """Say that fewer tokens will come of an attempt, unless it is over."""
        key = offer.request_id, offer.epoch
        if self.queue.is_alive(key):
            self._rate.dropped(key)  # Commit comes when whoever offered gave up waiting, not when the link was done
            self.send(offer)

    def send_chunk(self, header: ChunkHeader, pages: Sequence[BlockId], checksums: np.ndarray | None) -> None:
        """Send a chunk, unless its attempt is over.

        Raises ValueError, in the caller's thread, if the header is too long to go in front of a message, or its group
        does not move over this link.
        """
        if not self.queue.is_alive((header.request_id, header.epoch)):
            return
        if header.group not in self.groups:
            moved = ", ".join(map(str, self.groups))
            raise ValueError(f"group is {header.group}; {moved} move to {self.peer_id}")
        try:
            header = self._for_peer(header, pages, checksums)
        except TransferError as error:
            self.fail(str(error), error.code)
            return
        if self._pull_sender is not None:
            self._pull_sender.put(PullReady.of(header, list(pages)))
        else:
            check_sendable(header)
            self.queue.put(ChunkJob(header, list(pages)))

    def chunk_scheduled(
        self, key: Key, first_token: int, num_tokens: int, pages: Sequence[BlockId], early_planes: int, group: int = 0
    ) -> None:
        """Announce a chunk that is about to be computed; nothing is sent unless decode fetches."""
        if self._pull_sender is not None:
            number = self.groups.index(group)
            self._pull_sender.chunk_scheduled(key, first_token, num_tokens, list(pages), early_planes, number)

    def chunks_launched(self, is_all: bool) -> None:
        """Report launched chunks; see node.TransferNode."""
        if self._pull_sender is not None:
            self._pull_sender.chunks_launched(is_all)

    def has_queued(self, key: Key) -> bool:
        """Return whether a chunk of the attempt waits to be sent, or is on its way."""
        return self.queue.has_queued(key) or (self._pull_sender is not None and self._pull_sender.has_unfetched(key))

    def on_message(self, message: HandoffMessage) -> None:
        """Handle a message; one that a chunk was fetched is of no use to the owner before it asks."""
        if isinstance(message, Fetched) and self._pull_sender is not None:
            self._pull_sender.fetched((message.request_id, message.epoch), message.index)
        else:
            super().on_message(message)

    def finish(self, fin: Fin) -> None:
        """Send Fin after the chunks that were queued before."""
        if self._pull_sender is not None:
            self._pull_sender.put(fin)
        else:
            self.queue.put(FinJob(fin))

    def end(self, key: Key) -> None:
        """Drop the attempt.

        Pages that decode may be reading are drained when decode says so: by AbortAck, or by an Abort of its own.
        """
        self._rate.dropped(key)
        if self._pull_sender is None:
            super().end(key)
        elif self._pull_sender.end(key) or key in self._acks:
            self._pull_sender.read(key)
            self._on_drained(key)

    @property
    def is_untried(self) -> bool:
        return super().is_untried and not self.was_asked

    @property
    def nbytes_per_s(self) -> float:
        return self._rate.nbytes_per_s

    def _connect_and_serve(self) -> None:
        sock = self._dial()
        self._hold(sock)
        wire = HandshakeSocket(sock, Deadline(self.parts.settings.handshake_timeout_s))
        handshake.greet_listener(wire, self.parts.identity, self._peer)
        self.parts.on_proved(self)
        ours, ring = self.parts.terms, self.parts.ring
        theirs = handshake.agree(wire, ours, sends=True)
        self._num_parts = conversion.num_parts(ours.layout, theirs.layout)
        pairs = conversion.shared_groups(ours.layout, theirs.layout)
        self._share(theirs.layout, [index for index, _ in pairs])
        layout = theirs.layout.of_groups(index for _, index in pairs)
        self._other_layout = layout if layout != ours.layout else None
        for pool in self.parts.pools:
            pool.agreed(self._num_parts, sends=True)
        names = candidates(ours, theirs)
        self.transport, channel = handshake.propose(wire, names, self.parts.transports.find, ring, self._dial_data)
        if isinstance(channel, SharedPool):
            # Decode checks for the end of this connection before it trusts a copy, and must see it even if its socket
            # is full.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            facts = self.queue, channel.mark, self.send, self._rate.reported
            self._pull_sender = PullSender(*facts, tells_fetched=theirs.hears_fetched)  # who hears it says it, too
            self._serve(sock, theirs, channel, self._pull_sender)
            return
        stagings = sender_stagings(channel, self.parts.pools, self.groups, ring, ours, theirs)
        compressor = None
        if isinstance(channel, TcpOutbound) and (levels := common_levels(ours, theirs, self.transport)):
            self._segments = SegmentCodec(layout, self._num_parts, levels)
            compressor = Compressor(self.peer_id, self._segments, ring.slot_nbytes, lambda: channel.queued_nbytes)
        sender = Sender(self.queue, stagings, channel, self.send, self._rate.sent, self._on_drained, compressor)
        self._serve(sock, theirs, channel, sender)

    def _for_peer(self, header: ChunkHeader, pages: Sequence[BlockId], checksums: np.ndarray | None) -> ChunkHeader:
        """Return the header of the same chunk in the peer's layout, as the peer checks it."""
        group = self.groups.index(header.group)
        facts: dict[str, int | str] = {"group": group}
        if checksums is not None:
            sums = self.parts.pools[header.group].in_parts(checksums, pages, self._num_parts)
            facts["checksum"] = integrity.of_pages(header.epoch, sums, group)
        if layout := self._other_layout:
            nbytes = plan.chunk_nbytes(layout, header.num_tokens, group)
            facts |= {"layout_id": layout.layout_id, "nbytes": nbytes}
        return msgspec.structs.replace(header, **facts)

    def _dial(self) -> socket.socket:
        host, _, port = self._peer.transfer.rpartition(":")
        try:
            return socket.create_connection((host.strip("[]"), int(port)), self.parts.settings.connect_timeout_s)
        except (OSError, ValueError) as error:
            raise PeerLost(f"can't connect to {self.peer_id} at {self._peer.transfer}: {error}") from error

    def _dial_data(self, session: bytes) -> socket.socket:
        sock = self._dial()
        wire = HandshakeSocket(sock, Deadline(self.parts.settings.connect_timeout_s))
        try:
            wire.send(handshake.attach_frame(self.parts.identity.secret, session))
        except PeerLost:
            sock.close()
            raise
        return sock

    def _note(self, message: HandoffMessage) -> None:
        key = message.request_id, message.epoch
        if self._pull_sender is not None:
            self._note_read(self._pull_sender, message, key)
        if isinstance(message, Commit):
            self._rate.committed(key, time.perf_counter())
            self.parts.paths.worked(self.incarnation)
        elif isinstance(message, Abort) and message.code == Corrupt.code:
            self.parts.paths.failed(self.incarnation)
        elif isinstance(message, Refuse):
            self._rate.dropped(key)
        if isinstance(message, Refuse | Commit):
            self.queue.forget(key)

    def _note_read(self, pull_sender: PullSender, message: HandoffMessage, key: Key) -> None:
        if isinstance(message, Grant):
            pull_sender.granted(key)
        elif isinstance(message, Refuse):
            pull_sender.end(key)
        elif isinstance(message, Commit):
            pull_sender.committed(key)
        elif isinstance(message, AbortAck) and pull_sender.read(key):
            self._on_drained(key)
