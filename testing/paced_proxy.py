"""A TCP proxy whose way to the server is of a given rate: a slow network for tests."""

import socket
import threading
import time

_READ_NBYTES = 16 << 10
_BUFFER_NBYTES = 64 << 10
"""The receive buffer of the slow way, so small that what waits is seen in the sender's own queue."""


class PacedProxy:
    """A proxy on the loopback interface, until it is closed.

    `target`: the `host:port` that it connects to. `nbytes_per_s`: of all connections together, towards the target; the
    way back is not paced. `listen`: its own address.
    """

    def __init__(self, target: str, nbytes_per_s: float, listen: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._nbytes_per_s = (host, int(port)), nbytes_per_s
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_NBYTES)  # inherited
        self._listener.bind(listen)
        self._listener.listen()
        self._sockets: list[socket.socket] = [self._listener]
        self._lock, self._due_s = threading.Lock(), 0.0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def close(self) -> None:
        """End all connections; return when no thread runs any more."""
        for sock in list(self._sockets):
            _shut(sock)
        for thread in list(self._threads):
            thread.join()
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            for source, sink, paced in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._forward, args=(source, sink, paced), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, paced: bool) -> None:
        try:
            while data := source.recv(_READ_NBYTES):
                if paced:
                    self._wait_for(len(data))
                sink.sendall(data)
        except OSError:  # either side is gone
            pass
        finally:
            _shut(source)
            _shut(sink)

    def _wait_for(self, nbytes: int) -> None:
        with self._lock:
            self._due_s = max(self._due_s, time.monotonic()) + nbytes / self._nbytes_per_s
            due_s = self._due_s
        time.sleep(max(0.0, due_s - time.monotonic()))


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is not connected any more
        return
