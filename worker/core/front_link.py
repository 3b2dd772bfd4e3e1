"""The core's end of the socket pair to its front: frames in and out, and a wake-up for other threads."""

import os
import selectors
import socket

from contracts.codec import FrameReader, decoder, frame
from worker.messages import ToCore, ToFront

RECEIVE_NBYTES = 1 << 20


class FrontDisconnected(Exception):
    """The front closed its end: there is no work left."""


class FrontLink:
    """The connection to the front, which takes over the socket.

    Sends block (each step sends one small frame), waits are bounded by the caller. Any thread may call `wake()`.
    """

    def __init__(self, sock: socket.socket) -> None:
        with sock:
            self._sock = sock.dup()  # to the lowest free number: select takes none from 1024 on
        self._reader = FrameReader()
        self._decoder = decoder(ToCore)
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.SelectSelector()  # epoll waits whole milliseconds
        self._selector.register(self._sock, selectors.EVENT_READ)
        self._selector.register(self._event, selectors.EVENT_READ)

    def wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def receive(self, timeout_s: float) -> list[ToCore]:
        """Return the messages that have arrived, waiting at most `timeout_s` for the first message or wake-up.

        Raises FrontDisconnected.
        """
        messages: list[ToCore] = []
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._event:
                os.eventfd_read(self._event)
            else:
                messages += self._read()
        return messages

    def send(self, message: ToFront) -> None:
        try:
            self._sock.sendall(frame(message))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise FrontDisconnected from error

    def close(self) -> None:
        self._selector.close()
        self._sock.close()
        os.close(self._event)

    def _read(self) -> list[ToCore]:
        data = self._sock.recv(RECEIVE_NBYTES)
        if not data:
            raise FrontDisconnected
        return [self._decoder.decode(payload) for payload in self._reader.feed(data)]
