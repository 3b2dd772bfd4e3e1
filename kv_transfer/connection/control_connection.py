"""The control connection after the handshake: frames, heartbeats, and detection of a lost peer."""

import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from contracts import codec
from contracts.handoff import HandoffMessage
from kv_transfer.connection.handshake_frames import HANDOFF

RECEIVE_NBYTES = 1 << 18
MAX_UNSENT_NBYTES = 64 << 20
PEER_CLOSED = "the peer closed the control connection"
HEARTBEAT = (0).to_bytes(codec.HEADER_NBYTES, "little")


class ControlConnection:
    """A control connection, served by `run` in the caller's thread until it ends.

    `send` and `stop` may be called from any thread and never block. An empty frame every `heartbeat_s` is the
    heartbeat; silence for `silence_s` ends the connection, not counting the time in which this process itself was held
    up. The thread sleeps no longer than `patience_s()`, evaluated before each sleep, and not at all if that is 0:
    waking up costs a fifth of a millisecond.
    """

    def __init__(
        self,
        sock: socket.socket,
        heartbeat_s: float,
        silence_s: float,
        max_frame_nbytes: int,
        patience_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._heartbeat_s, self._silence_s = sock, heartbeat_s, silence_s
        self._poll_timeout_s = patience_s
        self._reader = codec.FrameReader(max_frame_nbytes)
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._error: str | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)

    def run(self, on_message: Callable[[HandoffMessage], None]) -> str:
        """Serve the connection and return why it ended. The socket is closed then."""
        try:
            return self._run(on_message)
        except Exception as error:  # raised by `on_message`: it ends the connection, too
            self.stop(f"{type(error).__name__}: {error}")
            raise
        finally:
            with self._lock:
                self._error = self._error or "closed"
                self._sock.close()
                os.close(self._wake)

    def send(self, message: HandoffMessage) -> None:
        """Send the message; after the end do nothing, since the loss of the peer is being reported already."""
        self._send(codec.frame(message))

    @property
    def is_closed_there(self) -> bool:
        """Return whether the peer has closed its end, even if there are unread messages of it.

        Called by the thread of `run`.
        """
        poller = select.poll()
        poller.register(self._sock, select.POLLRDHUP)
        return bool(poller.poll(0))

    def stop(self, why: str) -> str:
        """End the connection and return the reason: `why`, unless there was an earlier one."""
        with self._lock:
            self._end(why)
            return self._error or why

    def _run(self, on_message: Callable[[HandoffMessage], None]) -> str:
        now = time.monotonic()
        last_heard, next_beat = now, now
        while self._error is None:
            if now >= next_beat:
                self._send(HEARTBEAT)
                next_beat = now + self._heartbeat_s
            due = max(now, min(next_beat, last_heard + self._silence_s))
            self._wait(due - now)
            now = time.monotonic()
            # Read before judging: if this thread was held up, the peer's heartbeats are in the socket.
            if self._read(on_message):
                last_heard = now
            elif now - due > self._heartbeat_s:
                last_heard += now - due  # the whole machine was paused, say: the peer could send nothing
            elif now - last_heard >= self._silence_s:
                self.stop(f"silent for {self._silence_s:g} s")
        return self._error

    def _wait(self, timeout_s: float) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        patience_s = self._poll_timeout_s()
        ready = dict(poller.poll(min(timeout_s, patience_s) * 1000 + 1 if patience_s else 0))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if self._unsent:
            with self._lock:
                self._flush()

    def _read(self, on_message: Callable[[HandoffMessage], None]) -> bool:
        try:
            data = self._sock.recv(RECEIVE_NBYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # the peer closed with data unsent, or unread here
            data = b""
        except OSError as error:
            self.stop(f"the control connection failed: {error}")
            return False
        if not data:
            self.stop(PEER_CLOSED)
            return False
        self._dispatch(data, on_message)
        return True

    def _dispatch(self, data: bytes, on_message: Callable[[HandoffMessage], None]) -> None:
        try:
            for payload in self._reader.feed(data):
                if payload and self._error is None:  # a failed link ignores further messages
                    on_message(HANDOFF.decode(payload))
        except (ValueError, msgspec.DecodeError) as error:
            self.stop(f"the peer does not keep to the protocol: {error}")

    def _send(self, frame: bytes) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._unsent += frame
            self._flush()
            if self._unsent:
                os.eventfd_write(self._wake, 1)

    def _flush(self) -> None:
        """Pass to the kernel what it accepts now; under the lock."""
        if self._error is not None:
            return
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT_NBYTES:
                self._end("the peer does not read its control connection")
        except OSError as error:
            self._end(f"the control connection failed: {error}")

    def _end(self, why: str) -> None:
        """Record the first reason for the end, under the lock."""
        if self._error is None:
            self._error = why
            os.eventfd_write(self._wake, 1)
