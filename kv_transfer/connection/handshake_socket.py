"""Whole frames on a blocking socket before a deadline, for the handshake.

Nothing is read beyond the end of a frame.
"""

import hashlib
import hmac
import logging
import select
import socket
import time
from ipaddress import ip_address
from typing import Any, TypeVar

import msgspec

from contracts import codec
from contracts.errors import AuthFailed, ConfigError, PeerLost, TransferError
from kv_transfer.connection.handshake_frames import ANY_FRAME, Rejected

log = logging.getLogger(__name__)

HELLO_MAX_NBYTES = 4 << 10
FRAME_MAX_NBYTES = 64 << 10

Frame = TypeVar("Frame", bound=msgspec.Struct)


class Deadline:
    """The deadline of a handshake, which may be renewed."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.renew()

    def renew(self) -> None:
        self._end = time.monotonic() + self._timeout_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def left_s(self) -> float:
        """Return the seconds that are left. Raises PeerLost if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise PeerLost("the handshake took too long")
        return left


class HandshakeSocket:
    """A socket that sends and receives handshake frames.

    `raw_sent` and `raw_received`: the payloads of the last frame each way, for proofs over the exact bytes.
    """

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self.sock, self.deadline = sock, deadline
        self.raw_sent = self.raw_received = b""
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)

    def send(self, message: msgspec.Struct) -> None:
        self.raw_sent = codec.encode(message)
        try:
            self.sock.settimeout(self.deadline.left_s())
            self.sock.sendall(len(self.raw_sent).to_bytes(codec.HEADER_NBYTES, "little") + self.raw_sent)
        except OSError as error:
            raise PeerLost(f"the connection failed in the handshake: {error}") from error

    def receive(self, kind: type[Frame], max_nbytes: int = FRAME_MAX_NBYTES) -> Frame:
        """Receive a frame of this kind.

        Raises the error that a Rejected names, PeerLost, or TransferError on another frame.
        """
        message = self.receive_any(max_nbytes)
        if isinstance(message, Rejected):
            raise _rejection(message)
        if not isinstance(message, kind):
            raise TransferError(f"expected {kind.__name__} in the handshake, got {type(message).__name__}")
        return message

    def receive_any(self, max_nbytes: int = FRAME_MAX_NBYTES) -> Any:
        nbytes = int.from_bytes(self._exactly(codec.HEADER_NBYTES), "little")
        if not 0 < nbytes <= max_nbytes:
            raise TransferError(f"a first frame of {nbytes} bytes: this is not a Tandem worker")
        self.raw_received = self._exactly(nbytes)
        try:
            return ANY_FRAME.decode(self.raw_received)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransferError(f"unreadable handshake: {error}") from error

    @property
    def is_local(self) -> bool:
        """Return whether the peer is connected over the loopback interface."""
        if self.sock.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        try:
            return ip_address(self.sock.getpeername()[0]).is_loopback
        except OSError as error:
            raise PeerLost(f"the connection failed in the handshake: {error}") from error

    @property
    def is_quiet(self) -> bool:
        """Return whether there is time left and the peer has neither sent anything nor closed."""
        return not self.deadline.is_over and not self._poller.poll(0)

    def _exactly(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            try:
                self.sock.settimeout(self.deadline.left_s())
                part = self.sock.recv(nbytes - len(data))
            except OSError as error:
                raise PeerLost(f"the connection failed in the handshake: {error}") from error
            if not part:
                raise PeerLost("the peer closed the connection in the handshake")
            data += part
        return data


def shut(sock: socket.socket) -> None:
    """Shut the socket down, which wakes the threads that wait on it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("the socket was shut already: %s", error)


def prove(secret: bytes, label: bytes, *said: bytes) -> bytes:
    """Return the HMAC-SHA256 over a label and the frames that both ends saw."""
    digest = hmac.new(secret, label, hashlib.sha256)
    for part in said:
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()


def _rejection(message: Rejected) -> Exception:
    kinds = {"auth_failed": AuthFailed, "config": ConfigError, "layout_mismatch": ConfigError}
    return kinds.get(message.code, TransferError)(f"the peer refused: {message.reason}")
