"""The decode end of a link: made when a peer has proved itself, it lands what was granted."""

import logging
import socket
from collections.abc import Callable

from contracts.errors import TandemError
from contracts.handoff import Abort, AbortAck, ChunkHeader, Fin, Grant, HandoffMessage, Offer
from kv_transfer import handshake
from kv_transfer.events import ChunkBad, ChunkLanded
from kv_transfer.frames import Hello
from kv_transfer.link import Link, LinkParts
from kv_transfer.receiving import Landings, Receiver
from kv_transfer.wire import HandshakeSocket

log = logging.getLogger(__name__)


class IncomingLink(Link):
    outgoing = False
    hears = (Offer, Fin, Abort, AbortAck)

    def __init__(self, parts: LinkParts, hello: Hello) -> None:
        self.landings = Landings(parts.layout, parts.pool.num_blocks)
        super().__init__(parts, hello.worker_id, hello.incarnation, self.landings)

    def run(self, wire: HandshakeSocket, attached: Callable[[bytes], socket.socket]) -> None:
        """Serve it in the thread that shook hands."""
        self._sock = wire.sock
        self._run_to_the_end(lambda: self._agree_and_serve(wire, attached))

    def grant(self, grant: Grant) -> None:
        """Ignored if the offer is gone. Raises ValueError if it does not fit the offer or the pool."""
        if self.landings.grant(grant):
            self.send(grant)

    def _agree_and_serve(self, wire: HandshakeSocket, attached: Callable[[bytes], socket.socket]) -> None:
        ours, find = self.parts.terms, self.parts.transports.find
        try:
            theirs = handshake.agree(wire, ours)
            names = handshake.candidates(theirs, ours)
            self.transport, channel = handshake.dispose(wire, names, find, self.parts.ring, attached)
        except TandemError as error:
            handshake.reject(wire, error)
            raise
        receiver = Receiver(
            self.landings,
            self.parts.pool,
            channel,
            ours.checksum or theirs.checksum,
            self._on_landed,
            self._on_bad,
            self._on_drained,
        )
        self._serve(wire.sock, theirs, channel, receiver)

    def _note(self, message: HandoffMessage) -> None:
        if isinstance(message, Offer):
            self.landings.offered(message)

    def _on_landed(self, header: ChunkHeader) -> None:
        self.parts.emit(ChunkLanded(self.peer_id, header))

    def _on_bad(self, header: ChunkHeader, reason: str) -> None:
        log.warning("chunk %d of %s from %s is bad: %s", header.index, header.request_id, self.peer_id, reason)
        self.parts.emit(ChunkBad(self.peer_id, header, reason))
