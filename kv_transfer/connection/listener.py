"""The port that peers connect to, with control connections and data sockets.

The peer must prove on each that it knows the secret.
"""

import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from contracts.errors import ConfigError, PeerLost, TandemError, TransferError
from kv_transfer.connection import handshake
from kv_transfer.connection.handshake import SESSION_NBYTES, Identity
from kv_transfer.connection.handshake_frames import Attach, Hello
from kv_transfer.connection.handshake_socket import HELLO_MAX_NBYTES, Deadline, HandshakeSocket, shut
from kv_transfer.settings import TransferSettings

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 32
ROOM_S = 0.1
"""The time in seconds within which a thread whose connection is cut returns its place."""


class Listener:
    """The listener, which runs `on_peer(wire, hello)` in a thread of its own for each proved peer.

    `on_peer` owns the socket. Raises ConfigError if it can't bind.
    """

    def __init__(
        self, settings: TransferSettings, identity: Identity, on_peer: Callable[[HandshakeSocket, Hello], None]
    ) -> None:
        self._settings, self._identity, self._on_peer = settings, identity, on_peer
        self.attachments = Attachments(settings.handshake_timeout_s)
        self._sock = _bind(settings.host, settings.port)
        self.port: int = self._sock.getsockname()[1]
        self._stop = os.eventfd(0, os.EFD_NONBLOCK)
        self._slots = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._open: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept_all, name="kv-listen", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the port, and cut every handshake that is under way."""
        os.eventfd_write(self._stop, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._sock.close()
        os.close(self._stop)
        with self._lock:
            for sock in self._open:
                shut(sock)
        self.attachments.close()

    def join(self) -> None:
        """Wait for the threads of all peers that connected; their links must have been failed before."""
        for thread in self._threads:
            thread.join()

    def _accept_all(self) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        while self._stop not in dict(poller.poll()):
            try:
                sock, address = self._sock.accept()
            except OSError as error:  # the caller has gone again, or no descriptor is free: both pass
                log.warning("a connection could not be accepted: %s", error)
                select.select([self._stop], [], [], 0.1)
                continue
            self._greet(sock, address)

    def _greet(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        if not self._has_room():
            log.warning("%s is refused: %d handshakes are under way", address[0], MAX_HANDSHAKES)
            sock.close()
            return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._shake_hands, args=(sock, address), name="kv-peer", daemon=True)
        with self._lock:
            self._open[sock] = None
        try:
            thread.start()
        except RuntimeError as error:  # no thread is left, for now
            log.warning("%s is refused: %s", address[0], error)
            self._release(sock)
            sock.close()
            return
        self._threads.append(thread)

    def _has_room(self) -> bool:
        """Take a place for a handshake, and return whether there was one.

        The first frames of a peer take milliseconds: the connection that is longest at them may be a stranger's that
        sends nothing, and is cut for the next one. Otherwise a few of those would keep all peers out.
        """
        if self._slots.acquire(blocking=False):
            return True
        with self._lock:
            if self._open:
                oldest = next(iter(self._open))
                del self._open[oldest]
                shut(oldest)
        return self._slots.acquire(timeout=ROOM_S)

    def _shake_hands(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        wire = HandshakeSocket(sock, Deadline(self._settings.handshake_timeout_s))
        try:
            hello = self._first_words(wire)
        except TandemError as error:
            # Quoted: it may repeat bytes of a stranger, which could otherwise forge lines of the log.
            log.warning("connection from %s refused: %r", address[0], str(error))
            handshake.reject(wire, error)
            sock.close()
            hello = None
        finally:
            self._release(sock)
        if hello is not None:
            self._on_peer(wire, hello)

    def _release(self, sock: socket.socket) -> None:
        self._slots.release()
        with self._lock:
            self._open.pop(sock, None)

    def _first_words(self, wire: HandshakeSocket) -> Hello | None:
        """Return the proved peer's Hello, or None if it was a data socket, which is parked now."""
        first = wire.receive_any(HELLO_MAX_NBYTES)
        if isinstance(first, Attach):
            handshake.check_attach(self._identity.secret, first)
            self.attachments.put(first.session, wire.sock)
            return None
        if not isinstance(first, Hello):
            raise TransferError(f"a connection can't begin with {type(first).__name__}")
        handshake.greet_dialer(wire, self._identity, first)
        return first


class Attachments:
    """Data sockets that wait, for the time of a handshake, until their control connection takes them."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._parked: dict[bytes, tuple[socket.socket, Deadline]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, session: bytes, sock: socket.socket) -> None:
        with self._changed:
            self._expire()
            if self._closed or session in self._parked or len(session) != SESSION_NBYTES:
                raise TransferError("this data socket is not expected")
            self._parked[session] = sock, Deadline(self._timeout_s)
            self._changed.notify_all()

    def take(self, session: bytes) -> socket.socket:
        """Wait for the data socket of this session. Raises PeerLost if it does not come in time."""
        with self._changed:
            if (
                not self._changed.wait_for(lambda: session in self._parked or self._closed, self._timeout_s)
                or self._closed
            ):
                raise PeerLost("the peer's data socket did not come")
            return self._parked.pop(session)[0]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for sock, _ in self._parked.values():
                sock.close()
            self._parked.clear()
            self._changed.notify_all()

    def _expire(self) -> None:
        for session, (sock, deadline) in list(self._parked.items()):
            if deadline.is_over:
                sock.close()
                del self._parked[session]


def _bind(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), backlog=128, family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise ConfigError(
            f"the KV transfer can't listen on {host}:{port}: {error}; choose another transfer_port"
        ) from error
