"""The decode end of a link: made when a peer has proved itself, it writes chunks to granted pages."""

import logging
import math
import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import msgspec

from contracts.errors import TandemError, TransferError
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
    PrefixRequest,
    PullReady,
    PullScheduled,
)
from contracts.kv_loss import EXACT, joined
from kv_transfer.chunks.device_pool import RemotePool
from kv_transfer.connection import handshake
from kv_transfer.connection import layout_negotiation as conversion
from kv_transfer.connection.handshake_frames import Hello, Terms
from kv_transfer.connection.handshake_socket import HandshakeSocket
from kv_transfer.connection.transport_choice import candidates, common_levels
from kv_transfer.data_path.compression import SegmentCodec
from kv_transfer.data_path.grant import GrantTable
from kv_transfer.data_path.pull_receiver import PullReceiver
from kv_transfer.data_path.receiver import Receiver
from kv_transfer.data_path.staging import stagings_of
from kv_transfer.events import ChunkBad, ChunkLanded
from kv_transfer.links.link import Link, LinkParts
from kv_transfer.transports.base import DeviceInbound
from kv_transfer.transports.nvlink import MappedPool

log = logging.getLogger(__name__)


class IncomingLink(Link):
    """The decode end of a link."""

    outgoing = False
    receives = (Offer, PullScheduled, PullReady, Fin, Abort, AbortAck, PrefixRequest)

    def __init__(self, parts: LinkParts, hello: Hello) -> None:
        self.grants = GrantTable(parts.layout, [pool.num_blocks for pool in parts.pools])
        self._layout = parts.layout
        self._pull_receiver: PullReceiver | None = None
        self._is_quiet = self._has_looked = self._hears_fetched = False
        self._rounding_loss = EXACT
        super().__init__(parts, hello.worker_id, hello.incarnation, self.grants)

    def run(self, wire: HandshakeSocket, attached: Callable[[bytes], socket.socket]) -> None:
        """Serve the link in the thread that shook hands."""
        self._hold(wire.sock)
        self._run_to_the_end(lambda: self._agree_and_serve(wire, attached))

    @property
    def accepted_loss(self) -> str:
        """Return the loss of cached KV that serves as well as what comes over this link.

        Of KV in another number format that is what the same peers sent uncompressed; else see Link.
        """
        return self._rounding_loss or super().accepted_loss

    def grant(self, grant: Grant) -> None:
        """Grant pages; ignored if the offer is gone.

        Raises ValueError if they do not fit the offer or the pool.
        """
        if self.grants.grant(grant):
            if isinstance(self._channel, DeviceInbound) and self._is_alone():
                self._channel.expect(self._is_alone)
            self.send(grant)

    def commit(self, message: Commit) -> bool:
        """End the attempt, which the owner has taken over; see node.TransferNode.

        Commit is sent if it was not when token 0 and the last chunk had arrived.
        """
        key = message.request_id, message.epoch
        is_sent = self.grants.is_committed(key)
        is_drained = self.grants.end(key)
        if not is_sent:
            self.send(message)
        return is_drained

    def _agree_and_serve(self, wire: HandshakeSocket, attached: Callable[[bytes], socket.socket]) -> None:
        ours, find = self.parts.terms, self.parts.transports.find
        try:
            theirs = handshake.agree(wire, ours, sends=False)
            self._share(theirs.layout, [ours_ for _, ours_ in conversion.shared_groups(theirs.layout, ours.layout)])
            self._layout = ours.layout.of_groups(self.groups)
            self._rounding_loss = conversion.rounding_loss(theirs.layout, ours.layout)
            self.grants.agreed(self._layout, [self.parts.pools[group].num_blocks for group in self.groups])
            for pool in self.parts.pools:
                pool.agreed(conversion.num_parts(ours.layout, theirs.layout), sends=False)
            names = candidates(theirs, ours)
            self.transport, channel = handshake.dispose(wire, names, find, self.parts.ring, attached)
        except TandemError as error:
            handshake.reject(wire, error)
            raise
        if isinstance(channel, MappedPool):
            self._hears_fetched = theirs.hears_fetched
            self._pull_receiver = self._pull_receiver_of(channel.remotes, theirs.checksum)
            self._serve(wire.sock, theirs, channel, self._pull_receiver)
            return
        self._segments = self._segment_codec(theirs)
        receiver = Receiver(
            self.grants,
            stagings_of(channel, self.parts.pools, self.groups, self.parts.ring, receiver=ours, sender=theirs),
            channel,
            self.send,
            self._on_arrived,
            self._on_bad,
            self._on_drained,
            self._segments,
        )
        self._serve(wire.sock, theirs, channel, receiver)

    def _segment_codec(self, theirs: Terms) -> SegmentCodec | None:
        """Return the codec of messages, if the peer may compress them."""
        ours = self.parts.terms
        levels = common_levels(theirs, ours, self.transport)
        return SegmentCodec(self._layout, conversion.num_parts(ours.layout, theirs.layout), levels) if levels else None

    def _pull_receiver_of(self, remotes: Sequence[RemotePool], checks: bool) -> PullReceiver:
        shared = [remotes[group] for group in self.groups]  # both ends have all of them, or there would be no mapping
        facts = self.grants, self._layout, shared, checks, self._is_left
        return PullReceiver(*facts, self.send, self._on_fetched, self._on_bad, self._on_drained)

    def _is_left(self) -> bool:
        return self._control is not None and self._control.is_closed_there

    def _poll_timeout_s(self) -> float:
        if self._pull_receiver is None:
            return math.inf
        if self._is_quiet and not self._has_looked:
            self._has_looked = True
            return 0.0
        if self._is_quiet:
            self._is_quiet = self._has_looked = False
            self.parts.wake()
        with self._pulling():
            timeout_s = self._pull_receiver.tend()
            if not self._is_alone():
                return timeout_s
            self._pull_receiver.look_ahead()
        return 0.0

    def _is_alone(self) -> bool:
        """Return whether a thread that does not sleep would disturb no other."""
        return self.grants.is_alone and not self.parts.is_busy()

    def on_message(self, message: HandoffMessage) -> None:
        """Handle a chunk to fetch here: the owner is notified only when it has arrived."""
        if not isinstance(message, PullScheduled | PullReady):
            super().on_message(message)
        elif self._pull_receiver is None:
            raise ValueError(f"prefill wants a chunk to be fetched over {self.transport}")
        else:
            with self._pulling():
                if isinstance(message, PullReady):
                    self._pull_receiver.put(message)
                else:
                    self._pull_receiver.on_pull_scheduled(message)

    @contextmanager
    def _pulling(self) -> Generator[None, None, None]:
        """End the link if the device can't copy; it is then fenced as always."""
        try:
            yield
        except TransferError as error:
            self.fail(str(error), error.code)

    def _note(self, message: HandoffMessage) -> None:
        if isinstance(message, Offer):
            self.grants.offered(message)
        elif isinstance(message, Fin) and (commit := self.grants.finished(message)):
            self.send(commit)

    def _on_arrived(self, header: ChunkHeader) -> None:
        self.parts.emit(self._landed(header))

    def _on_fetched(self, header: ChunkHeader) -> None:
        """Queue the event; the owner is woken after a look for what came with it, such as token 0.

        Two threads that are awake disturb each other.
        """
        self.parts.note(self._landed(header))
        self._is_quiet = True
        granted = self.grants.find((header.request_id, header.epoch)) if self._hears_fetched else None
        if granted is not None and granted.offer.is_bound:
            self.send(Fetched(header.request_id, header.epoch, header.index))

    def _landed(self, header: ChunkHeader) -> ChunkLanded:
        """Return the event of a chunk that is in its pages, with all that it is not what this worker computes."""
        if self._rounding_loss:
            header = msgspec.structs.replace(header, loss=joined(header.loss, self._rounding_loss))
        return ChunkLanded(self.peer_id, header, time.monotonic())

    def _on_bad(self, header: ChunkHeader, reason: str) -> None:
        log.warning("chunk %d of %s from %s is bad: %s", header.index, header.request_id, self.peer_id, reason)
        self.parts.emit(ChunkBad(self.peer_id, header, reason))
