"""The transport over raw sockets, which has no dependencies and works everywhere.

Nothing in Python is faster between two hosts without RDMA.
"""

import fcntl
import socket
import sys
import termios
from collections.abc import Callable

import numpy as np

from contracts.errors import PeerLost
from kv_transfer.chunks.wire_format import META_NBYTES, read_meta
from kv_transfer.transports.base import ChannelOffer, Inbound, Outbound, Ring, Slot, Take
from kv_transfer.transports.stall_limit import LOOKS, StallLimit

# The kernel's buffer is what overlaps sending with packing, so it should hold a few messages.
SOCKET_BUFFER_NBYTES = 4 << 20


class TcpTransport:
    """The transport by a data socket for each channel."""

    name = "tcp"

    def open(self, session: bytes, ring: Ring, connect: Callable[[], socket.socket]) -> ChannelOffer:
        return _TcpOffer(connect(), ring)

    def accept(
        self, session: bytes, ring: Ring, params: bytes, attached: Callable[[], socket.socket]
    ) -> tuple[Inbound, bytes]:
        return TcpInbound(attached(), ring), b""

    def close(self) -> None:
        pass


class _TcpOffer:
    params = b""

    def __init__(self, sock: socket.socket, ring: Ring) -> None:
        self._sock, self._ring = sock, ring

    def finish(self, answer: bytes) -> Outbound:
        return TcpOutbound(self._sock, self._ring)

    def cancel(self) -> None:
        self._sock.close()


class _TcpChannel:
    """One end of a channel with one slot: the kernel's socket buffers are the ring."""

    def __init__(self, sock: socket.socket, ring: Ring, buffer_option: int, timeout_s: float | None) -> None:
        sock.setsockopt(socket.SOL_SOCKET, buffer_option, SOCKET_BUFFER_NBYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(timeout_s)
        self._sock = sock
        self._slot = Slot(0, np.zeros(ring.stride, dtype=np.uint8))

    @property
    def detail(self) -> str:
        return "raw socket"

    def interrupt(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer, or close(), was first
            return

    def close(self) -> None:
        self._sock.close()


class TcpOutbound(_TcpChannel):
    """The sender's end."""

    def __init__(self, sock: socket.socket, ring: Ring) -> None:
        super().__init__(sock, ring, socket.SO_SNDBUF, ring.stall_timeout_s / LOOKS)
        self._stall_timeout_s = ring.stall_timeout_s

    def acquire(self) -> Slot:
        return self._slot

    def send(self, slot: Slot, nbytes: int) -> None:
        view, limit = slot.buffer[: META_NBYTES + nbytes].data, StallLimit(self._stall_timeout_s)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except TimeoutError as error:
                if not limit.next_wait_s():
                    raise PeerLost(f"the data socket failed: {error}") from error
            except OSError as error:
                raise PeerLost(f"the data socket failed: {error}") from error

    def flush(self) -> None:
        pass

    @property
    def queued_nbytes(self) -> int:
        """Return the bytes that were sent and of which the peer's host has not said that it has them."""
        queued = fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        return int.from_bytes(queued, sys.byteorder)


class TcpInbound(_TcpChannel):
    """The receiver's end."""

    def __init__(self, sock: socket.socket, ring: Ring) -> None:
        super().__init__(sock, ring, socket.SO_RCVBUF, None)

    def receive(self, take: Take) -> None:
        self._fill(self._slot.meta)
        nbytes = read_meta(self._slot.meta).wire_nbytes
        if not 0 < nbytes <= len(self._slot.payload):
            raise PeerLost(f"a data message of {nbytes} bytes; the slot has {len(self._slot.payload)}")
        self._fill(self._slot.payload[:nbytes])
        take(self._slot)

    def _fill(self, buffer: np.ndarray) -> None:
        view = buffer.data
        while view:
            try:
                nbytes = self._sock.recv_into(view)
            except OSError as error:
                raise PeerLost(f"the data socket failed: {error}") from error
            if not nbytes:
                raise PeerLost("the peer closed the data socket")
            view = view[nbytes:]
