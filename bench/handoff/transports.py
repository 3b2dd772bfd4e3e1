"""KV transfer between two processes, gather and scatter included, beside what the machine can do.

    python -m bench.handoff.transports --starts 5 --rounds 5

Each case moves the scattered pages of one prompt, in chunks as prefill sends them. In every round all ways run in turn,
so that a noisy machine is noisy for all: `memcpy` copies the same pages in one process; `raw sockets` sends them with
blocking sendmsg of page iovecs and receives with recv_into; then the transports, from the first send_chunk to Commit.

All ways have pools of the same size, far beyond the last cache as a real one is, and move other pages in each round: a
pool of one short prompt lies in the cache, and its memcpy measures that. All memory is written before a clock runs.

Each of the two processes keeps to a core of its own: a scheduler that wakes the receiver on the sender's core halves
the rate of every way through sockets, in some rounds and not in others.

Where a process's memory came to lie decides as much, for as long as it lives: raw sockets made 1.8 GiB/s in one start
and 3.0 in the next. So all ways are started anew several times, and a figure is the median of its starts.

Only the transports check what they move, at both ends: the row `checksum` is that cost.
"""

import argparse
import itertools
import logging
import math
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from bench.report.result import ResultRow, write_result
from contracts.events import Token
from contracts.handoff import Commit, Fin, Grant, Offer
from contracts.ids import BlockId, Epoch, Incarnation, RequestId, WorkerId
from contracts.layout import KVLayout
from contracts.request import WorkerRef
from kv_transfer.chunks import checksum as integrity
from kv_transfer.events import ChunkLanded, MessageReceived, PeerDisconnected
from kv_transfer.node import TransferNode
from kv_transfer.settings import TransferSettings

SMOLLM2 = KVLayout(model="SmolLM2-135M", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
LLAMA = KVLayout(model="Llama-8B", num_layers=32, num_kv_heads=8, head_dim=128, block_size=64, dtype="float8_e4m3fn")
TRANSPORTS = ("shm", "ucx", "tcp")
CHUNK_TOKENS = 512
POOL_NBYTES = 256 << 20
NUM_SCATTERS = 4
MAX_IOVECS = 1024
CORES = sorted(os.sched_getaffinity(0))
DEADLINE_S = 60.0
SECRET = b"bench"
GIB = float(1 << 30)


@dataclass(frozen=True)
class TransferCase:
    layout: KVLayout
    num_tokens: int

    @property
    def num_blocks(self) -> int:
        return self.layout.num_blocks(self.num_tokens)

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.layout.block_nbytes

    @property
    def pool_blocks(self) -> int:
        return POOL_NBYTES // self.layout.block_nbytes

    @property
    def params(self) -> dict[str, object]:
        return {"model": self.layout.model, "page KiB": self.layout.page_nbytes // 1024, "tokens": self.num_tokens}


CASES = [
    TransferCase(SMOLLM2, 128),
    TransferCase(SMOLLM2, 1024),
    TransferCase(SMOLLM2, 4096),
    TransferCase(LLAMA, 1024),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="KV transfer between two processes beside memcpy and raw sockets")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/<date>-transfer-<hardware>.json)")
    parser.add_argument("--starts", type=int, default=5, help="of all processes, for each case (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of all ways, in each start (default: %(default)s)")
    options = parser.parse_args()
    os.sched_setaffinity(0, {CORES[0]})
    rows = [checksum_row(), *(row for case in CASES for row in bench_case(case, options.starts, options.rounds))]
    config = {
        "chunk_tokens": CHUNK_TOKENS,
        "pool_nbytes": POOL_NBYTES,
        "starts": options.starts,
        "rounds": options.rounds,
        "settings": repr(settings("auto")),
    }
    for row in rows:
        print(f"{row.name:34} {row.params} {row.value:9.4g} {row.unit}  {row.peer or ''} {row.peer_value or '':.4}")
    print(write_result(options.out, "transfer", rows, config))


def bench_case(case: TransferCase, num_starts: int, num_rounds: int) -> Iterator[ResultRow]:
    """Each row's median over the starts, and how far behind its peer each way was in them."""
    starts = [list(bench_start(case, num_rounds)) for _ in range(num_starts)]
    for rows in zip(*starts, strict=True):
        yield median_row(rows)
        ratios = [row.peer_value / row.value for row in rows if row.peer_value is not None]
        if ratios:
            name = f"{rows[0].name.removesuffix(' rate')} slower than {rows[0].peer}"
            yield ResultRow(f"{name}, median start", statistics.median(ratios), "times", case.params)
            yield ResultRow(f"{name}, worst start", max(ratios), "times", case.params)


def median_row(rows: Sequence[ResultRow]) -> ResultRow:
    """Of the same figure in several starts."""
    middle = {
        field: statistics.median(values)
        for field in ("value", "limit", "peer_value")
        if None not in (values := [getattr(row, field) for row in rows])
    }
    return replace(rows[0], **middle)


def bench_start(case: TransferCase, num_rounds: int) -> Iterator[ResultRow]:
    """All ways in turn, round by round; medians."""
    ways: list[Memcpy | RawSockets | Pair] = [
        Memcpy(case),
        RawSockets(case),
        *(Pair(case, name) for name in TRANSPORTS),
    ]
    for _ in range(2):
        for way in ways:
            way.move()
    moves = [[measure(way) for way in ways] for _ in range(num_rounds)]
    per_way = list(zip(*moves, strict=True))
    rates = [case.nbytes / GIB / statistics.median(wall_s for wall_s, _ in way_moves) for way_moves in per_way]
    cpus_s = [statistics.median(cpu_s for _, cpu_s in way_moves) for way_moves in per_way]
    for way, rate, cpu in zip(ways, rates, cpus_s, strict=True):
        peer = {"shm": 0, "ucx": 1, "tcp": 1}.get(way.name)
        peer_name, peer_rate = (ways[peer].name, rates[peer]) if peer is not None else (None, None)
        yield ResultRow(f"{way.name} rate", rate, "GiB/s", case.params, rates[0], peer_name, peer_rate)
        yield ResultRow(f"{way.name} CPU", cpu / (case.nbytes / GIB), "s/GiB", case.params)
    for way in ways:
        yield from way.latency_rows()
        way.close()


def measure(way: "Memcpy | RawSockets | Pair") -> tuple[float, float]:
    """Wall seconds, and CPU seconds of all processes that took part.

    Of the second of two moves: the first brings the way's code, not its pages, back into the caches.
    """
    way.move()
    before = way.cpu_s()
    wall_s = way.move()
    return wall_s, way.cpu_s() - before


def settings(transport: str) -> TransferSettings:
    return TransferSettings(secret=SECRET, transport=transport, heartbeat_s=1.0)


def checksum_row() -> ResultRow:
    """At one end, over pieces as they lie in staging just after they were packed."""
    piece = np.random.default_rng(7).bytes(settings("auto").slot_nbytes)
    data, times_s = np.frombuffer(piece, dtype=np.uint8), []
    for _ in range(101):
        start = time.thread_time()
        integrity.extend(1, data)
        times_s.append(time.thread_time() - start)
    return ResultRow("checksum CPU, one end", statistics.median(times_s) / (len(piece) / GIB), "s/GiB")


def make_pool(case: TransferCase) -> np.ndarray:
    shape = (case.layout.num_planes, case.pool_blocks, case.layout.page_nbytes)
    return np.frombuffer(bytearray(np.random.default_rng(7).bytes(math.prod(shape))), dtype=np.uint8).reshape(shape)


def scatters(case: TransferCase, seed: int) -> list[list[BlockId]]:
    """Pages for one prompt, scattered over the pool; moves take these lists in turn."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(case.pool_blocks)[: case.num_blocks] for _ in range(NUM_SCATTERS)]
    return [[BlockId(int(page)) for page in order] for order in orders]


class Memcpy:
    """Page by page from one pool to another, in one thread."""

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


Target = Callable[[Connection, TransferCase, str], None]


class BenchChild:
    """A process that answers on a pipe. `target(pipe, case, name)` runs in it."""

    def __init__(self, target: Target, case: TransferCase, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(CORES[-1], target, theirs, case, name), daemon=True)
        self._process.start()

    def receive(self) -> object:
        if not self.pipe.poll(DEADLINE_S):
            raise TimeoutError("the other process does not answer")
        return self.pipe.recv()

    def cpu_s(self) -> float:
        """Of both processes so far."""
        self.pipe.send("cpu")
        answer = self.receive()
        assert isinstance(answer, float)
        return answer + time.process_time()

    def close(self) -> None:
        self.pipe.send("end")
        self._process.join(DEADLINE_S)


def serve(core: int, target: Target, pipe: Connection, case: TransferCase, name: str) -> None:
    os.sched_setaffinity(0, {core})
    target(pipe, case, name)


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
    """The pages of one prompt after the other in a pool, without end."""
    pool = make_pool(case)
    return itertools.cycle(
        [[pool[plane, page].data for plane in range(len(pool)) for page in pages] for pages in scatters(case, seed)]
    )


def send_views(sock: socket.socket, views: list[memoryview]) -> None:
    """sendmsg until all is sent: it may take only a part."""
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


def answer_pipe(pipe: Connection) -> None:
    while pipe.recv() != "end":
        pipe.send(time.process_time())


class Pair:
    """A prefill node here and a decode node in another process."""

    def __init__(self, case: TransferCase, transport: str) -> None:
        self.name, self._case = transport, case
        self._child = BenchChild(serve_decode, case, transport)
        address = str(self._child.receive())
        self._peer = WorkerRef(WorkerId("decode"), Incarnation("1"), "", address)
        self._woken = threading.Event()
        self._scatters = scatters(case, 1)
        me = (WorkerId("prefill"), Incarnation("1"))
        self._node = TransferNode(settings(transport), *me, case.layout, make_pool(case), self._woken.set)
        self._node.start()
        self._number = 0
        self._grant_s: list[float] = []

    def move(self) -> float:
        """Seconds from the first chunk to Commit; the grant is there before."""
        key = self._offer(self._case.num_tokens)
        start = time.perf_counter()
        for index, first in enumerate(range(0, self._case.num_tokens, CHUNK_TOKENS)):
            self._send(key, index, first, min(CHUNK_TOKENS, self._case.num_tokens - first))
        self._finish(key, index + 1)
        return time.perf_counter() - start

    def cpu_s(self) -> float:
        return self._child.cpu_s()

    def latency_rows(self) -> Iterator[ResultRow]:
        """Of requests of one block, in pools of this case's size."""
        self._grant_s.clear()
        commit_s = [self._move_one_block() for _ in range(200)]
        params = {**self._case.params, "tokens": self._case.layout.block_size}
        for name, seconds in (("Offer to Grant", self._grant_s), ("last chunk to Commit", commit_s)):
            yield ResultRow(f"{self.name} {name}, median", statistics.median(seconds) * 1e6, "us", params)
            yield ResultRow(f"{self.name} {name}, p99", sorted(seconds)[-2] * 1e6, "us", params)

    def close(self) -> None:
        self._node.close()
        self._child.close()

    def _move_one_block(self) -> float:
        key = self._offer(self._case.layout.block_size)
        start = time.perf_counter()
        self._send(key, 0, 0, self._case.layout.block_size)
        self._finish(key, 1)
        return time.perf_counter() - start

    def _offer(self, num_tokens: int) -> tuple[RequestId, Epoch]:
        self._number += 1
        key = RequestId(f"r{self._number}"), Epoch(1)
        start = time.perf_counter()
        self._node.offer(self._peer, Offer(*key, num_tokens, self._case.layout.layout_id))
        self._wait(Grant)
        self._grant_s.append(time.perf_counter() - start)
        return key

    def _send(self, key: tuple[RequestId, Epoch], index: int, first: int, num_tokens: int) -> None:
        block = self._case.layout.block_size
        scatter = self._scatters[self._number % NUM_SCATTERS]
        pages = scatter[first // block : -(-(first + num_tokens) // block)]
        self._node.send_chunk(self._peer.worker_id, *key, index, first, num_tokens, pages)

    def _finish(self, key: tuple[RequestId, Epoch], num_chunks: int) -> None:
        self._node.finish(self._peer.worker_id, Fin(*key, num_chunks, Token(0, 1), 0))
        self._wait(Commit)

    def _wait(self, kind: type) -> None:
        while self._woken.wait(DEADLINE_S):
            self._woken.clear()
            for event in self._node.poll():
                if isinstance(event, PeerDisconnected):
                    raise RuntimeError(f"{self.name}: {event.error}")
                if isinstance(event, MessageReceived) and isinstance(event.message, kind):
                    return
        raise TimeoutError(f"{self.name}: no {kind.__name__}")


def serve_decode(pipe: Connection, case: TransferCase, transport: str) -> None:
    logging.basicConfig(level=logging.ERROR)
    woken = threading.Event()
    me = (WorkerId("decode"), Incarnation("1"))
    node = TransferNode(settings(transport), *me, case.layout, make_pool(case), woken.set)
    node.start()
    pipe.send(node.address)
    threading.Thread(target=decode, args=(node, woken, case), daemon=True).start()
    answer_pipe(pipe)
    node.close()


def decode(node: TransferNode, woken: threading.Event, case: TransferCase) -> None:
    """Grant, and commit when all tokens are there."""
    scatter, landed, offered = itertools.cycle(scatters(case, 2)), 0, 0
    while woken.wait():
        woken.clear()
        for event in node.poll():
            match event:
                case MessageReceived(peer_id, Offer(request_id, epoch, num_tokens)):
                    landed, offered = 0, num_tokens
                    pages = next(scatter)[: case.layout.num_blocks(num_tokens)]
                    node.grant(peer_id, Grant(request_id, epoch, pages, 0))
                case ChunkLanded(peer_id, header, _):
                    landed += header.num_tokens
                    if landed == offered:
                        node.commit(peer_id, Commit(header.request_id, header.epoch, header.index + 1, 0))


if __name__ == "__main__":
    main()
