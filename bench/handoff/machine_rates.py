"""The ways of moving pages that show what the machine can do: memcpy and raw sockets."""

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from bench.handoff.second_process import BenchChild, answer_pipe
from bench.handoff.transfer_case import TransferCase, make_pool, scatters
from bench.report.result import ResultRow

MAX_IOVECS = 1024


class Memcpy:
    """A copy of page after page from one pool to another, in one thread."""

    name = "memcpy"

    def __init__(self, case: TransferCase) -> None:
        self._src, self._dst = make_pool(case), make_pool(case)
        both = zip(scatters(case, 1), scatters(case, 2), strict=True)
        self._pairs = itertools.cycle([list(zip(src, dst, strict=True)) for src, dst in both])

    def move(self) -> float:
        pairs = next(self._pairs)
        start = time.perf_counter()
        for src_plane, dst_plane in zip(self._src, self._dst, strict=True):
            for src, dst in pairs:
                dst_plane[dst] = src_plane[src]
        return time.perf_counter() - start

    def cpu_s(self) -> float:
        return time.process_time()

    def latency_rows(self) -> list[ResultRow]:
        return []

    def close(self) -> None:
        pass


class RawSockets:
    """Blocking sendmsg and recv_into of the pages themselves: no staging, no checks, no headers."""

    name = "raw sockets"

    def __init__(self, case: TransferCase) -> None:
        self._child = BenchChild(serve_raw, case, self.name)
        self._sock = socket.create_connection(("127.0.0.1", self._child.receive()))  # type: ignore[arg-type]
        self._views = page_views(case, 1)

    def move(self) -> float:
        views = next(self._views)
        start = time.perf_counter()
        for first in range(0, len(views), MAX_IOVECS):
            send_views(self._sock, views[first : first + MAX_IOVECS])
        assert self._sock.recv(1)
        return time.perf_counter() - start

    def cpu_s(self) -> float:
        return self._child.cpu_s()

    def latency_rows(self) -> list[ResultRow]:
        return []

    def close(self) -> None:
        self._sock.close()
        self._child.close()


def page_views(case: TransferCase, seed: int) -> Iterator[list[memoryview]]:
    """Yield the pages of one prompt after the other in a pool, without end."""
    pool = make_pool(case)
    return itertools.cycle(
        [[pool[plane, page].data for plane in range(len(pool)) for page in pages] for pages in scatters(case, seed)]
    )


def send_views(sock: socket.socket, views: list[memoryview]) -> None:
    """Call sendmsg until all is sent, since it may take only a part."""
    index, views = 0, list(views)
    while index < len(views):
        sent = sock.sendmsg(views[index:])
        while index < len(views) and sent >= len(views[index]):
            sent -= len(views[index])
            index += 1
        if sent:
            views[index] = views[index][sent:]


def serve_raw(pipe: Connection, case: TransferCase, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        sock, _ = server.accept()
    threading.Thread(target=receive_raw, args=(sock, page_views(case, 2)), daemon=True).start()
    answer_pipe(pipe)


def receive_raw(sock: socket.socket, prompts: Iterator[list[memoryview]]) -> None:
    while all(sock.recv_into(view, len(view), socket.MSG_WAITALL) for view in next(prompts)):
        sock.sendall(b"\0")
