"""The benchmark of KV transfer between two processes, gather and scatter included.

    python -m bench.handoff.transports --starts 5 --rounds 5

Each case moves the scattered pages of one prompt, in chunks as prefill sends them. In every round all ways run in turn,
so that a noisy machine is noisy for all: `memcpy` copies the same pages in one process; `raw sockets` sends them with
blocking sendmsg of page iovecs and receives with recv_into; then the transports, from the first send_chunk to Commit.

All ways have pools of the same size, far larger than the last-level cache as a real one is, and move other pages in
each round: a pool of one short prompt would lie in the cache, and its memcpy would measure that. All memory is written
before a clock runs.

Each of the two processes keeps to a core of its own: a scheduler that wakes the receiver on the sender's core halves
the rate of every way through sockets, in some rounds and not in others.

The placement of a process's memory matters as much, for as long as it lives: raw sockets reached 1.8 GiB/s in one start
and 3.0 in the next. So all ways are started anew several times, and a figure is the median of its starts.

Only the transports check what they move, at both ends: the row `checksum` is that cost.
"""

import argparse
import itertools
import logging
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from bench.handoff.machine_rates import Memcpy, RawSockets
from bench.handoff.second_process import CORES, DEADLINE_S, BenchChild, answer_pipe
from bench.handoff.transfer_case import (
    CASES,
    NUM_SCATTERS,
    POOL_NBYTES,
    TransferCase,
    make_pool,
    scatters,
)
from bench.report.result import ResultRow, write_result
from contracts.events import Token
from contracts.handoff import Commit, Fin, Grant, Offer
from contracts.ids import Epoch, Incarnation, RequestId, WorkerId
from contracts.request import WorkerRef
from kv_transfer.chunks import checksum as integrity
from kv_transfer.events import ChunkLanded, MessageReceived, PeerDisconnected
from kv_transfer.node import TransferNode
from kv_transfer.settings import TransferSettings

TRANSPORTS = ("shm", "ucx", "tcp")
CHUNK_TOKENS = 512
SECRET = b"bench"
GIB = float(1 << 30)


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
    """Yield the median of each row over the starts, and how far behind its peer each way was in them."""
    starts = [list(bench_start(case, num_rounds)) for _ in range(num_starts)]
    for rows in zip(*starts, strict=True):
        yield median_row(rows)
        ratios = [row.peer_value / row.value for row in rows if row.peer_value is not None]
        if ratios:
            name = f"{rows[0].name.removesuffix(' rate')} slower than {rows[0].peer}"
            yield ResultRow(f"{name}, median start", statistics.median(ratios), "times", case.params)
            yield ResultRow(f"{name}, worst start", max(ratios), "times", case.params)


def median_row(rows: Sequence[ResultRow]) -> ResultRow:
    """Return the medians of the same figure in several starts."""
    middle = {
        field: statistics.median(values)
        for field in ("value", "limit", "peer_value")
        if None not in (values := [getattr(row, field) for row in rows])
    }
    return replace(rows[0], **middle)


def bench_start(case: TransferCase, num_rounds: int) -> Iterator[ResultRow]:
    """Yield the medians of all ways, which take turns round by round."""
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
    """Return wall seconds, and CPU seconds of all processes that took part.

    They are those of the second of two moves: the first brings the code, not the pages, back into the caches.
    """
    way.move()
    before = way.cpu_s()
    wall_s = way.move()
    return wall_s, way.cpu_s() - before


def settings(transport: str) -> TransferSettings:
    return TransferSettings(secret=SECRET, transport=transport, heartbeat_s=1.0)


def checksum_row() -> ResultRow:
    """Return the CPU time of checksums at one end, over pieces as they lie in staging after packing."""
    piece = np.random.default_rng(7).bytes(settings("auto").slot_nbytes)
    data, times_s = np.frombuffer(piece, dtype=np.uint8), []
    for _ in range(101):
        start = time.thread_time()
        integrity.extend(1, data)
        times_s.append(time.thread_time() - start)
    return ResultRow("checksum CPU, one end", statistics.median(times_s) / (len(piece) / GIB), "s/GiB")


class Pair:
    """A prefill node in this process and a decode node in another."""

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
        """Return the seconds from the first chunk to Commit; the grant comes before."""
        key = self._offer(self._case.num_tokens)
        start = time.perf_counter()
        for index, first in enumerate(range(0, self._case.num_tokens, CHUNK_TOKENS)):
            self._send(key, index, first, min(CHUNK_TOKENS, self._case.num_tokens - first))
        self._finish(key, index + 1)
        return time.perf_counter() - start

    def cpu_s(self) -> float:
        return self._child.cpu_s()

    def latency_rows(self) -> Iterator[ResultRow]:
        """Yield the latencies of requests of one block, in pools of this case's size."""
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
        request_id, epoch = RequestId(f"r{self._number}"), Epoch(1)
        start = time.perf_counter()
        self._node.offer(self._peer, Offer(request_id, epoch, num_tokens, self._case.layout.layout_id))
        self._wait(Grant)
        self._grant_s.append(time.perf_counter() - start)
        return request_id, epoch

    def _send(self, key: tuple[RequestId, Epoch], index: int, first: int, num_tokens: int) -> None:
        block = self._case.layout.block_size
        scatter = self._scatters[self._number % NUM_SCATTERS]
        pages = scatter[first // block : -(-(first + num_tokens) // block)]
        self._node.send_chunk(self._peer.worker_id, *key, index, first, num_tokens, pages)

    def _finish(self, key: tuple[RequestId, Epoch], num_chunks: int) -> None:
        self._node.finish(self._peer.worker_id, Fin(key[0], key[1], num_chunks, Token(0, 1), 0))
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
    """Grant what is offered, and commit when all its tokens have landed."""
    scatter, landed, offered = itertools.cycle(scatters(case, 2)), 0, 0
    while woken.wait():
        woken.clear()
        for event in node.poll():
            match event:
                case MessageReceived(peer_id, Offer(request_id, epoch, num_tokens)):
                    landed, offered = 0, num_tokens
                    pages = next(scatter)[: case.layout.num_blocks(num_tokens)]
                    node.grant(peer_id, Grant(request_id, epoch, [pages], 0))
                case ChunkLanded(peer_id, header, _):
                    landed += header.num_tokens
                    if landed == offered:
                        node.commit(peer_id, Commit(header.request_id, header.epoch, header.index + 1, 0))


if __name__ == "__main__":
    main()
