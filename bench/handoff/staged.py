"""The part of bench.handoff.gpu that moves scattered pages through two transfer nodes.

Each node is in a process with a GPU. The time of a staged transport runs from the first chunk announced until decode
has found the last page right; the time until prefill has received Commit is given too.
"""

import multiprocessing
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from bench.handoff.core import SECRET
from bench.handoff.raw_pages import (
    LAYOUT,
    NVLINK_RATE,
    RAW_BLOCKS,
    fill,
    fill_values,
    holds,
    holds_rounded,
    is_narrow,
    raw_memory,
    raw_pool,
)
from bench.report.result import ResultRow
from contracts.handoff import Commit, Grant, Offer
from contracts.ids import BlockId, Epoch, Incarnation, RequestId, WorkerId
from contracts.layout import KVLayout
from contracts.request import WorkerRef
from engine.cuda.kv.transfer_pool import DeviceTransferPool
from kv_transfer.events import ChunkLanded, MessageReceived, PeerDisconnected
from kv_transfer.node import TransferNode
from kv_transfer.settings import TransferSettings
from worker.core.main import SWITCH_S

NUM_TURNS, NUM_WARM = 20, 3
SIZES = (16, 32, 128, 512)
"""Sizes in pages. The largest is left out for transports through the host's memory, which take too long for it."""
CHUNK_PAGES = 32
PREFILL, DECODE = WorkerId("prefill"), WorkerId("decode")
TIMEOUT_S = 60.0


def staged(
    devices: Sequence[str], transport: str, layout: KVLayout = LAYOUT, sizes: tuple[int, int] = (1, 1)
) -> list[ResultRow]:
    """Measure `transport` from prefill's `layout` to LAYOUT.

    Pages of the last turn are compared byte by byte, all pages by their checksums. The last row says what the link took
    of the memory of prefill's GPU, and what closing it gave back while decode lives on. `sizes` are the numbers of
    shards at each end; the second shard is in the memory of the other end's GPU.
    """
    layout, theirs_is = (
        msgspec.structs.replace(one, tp_size=size) for one, size in zip((layout, LAYOUT), sizes, strict=True)
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with shard_of(devices[1], layout) as followers, shard_of(devices[0], theirs_is) as their_followers:
        facts = devices[1], transport, theirs_is, their_followers
        decode = context.Process(target=_decode, args=(*facts, theirs), daemon=True)
        decode.start()
        try:
            return _prefill(devices[0], transport, layout, followers, sizes, ours)
        finally:
            decode.kill()


@contextmanager
def shard_of(device: str, layout: KVLayout) -> Iterator[list[bytes]]:
    """Yield what the follower of a group of two shares, from a process that lives while the block runs.

    A group of one has no follower.
    """
    if layout.tp_size == 1:
        yield []
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    follower = context.Process(target=_follow, args=(device, layout, theirs), daemon=True)
    follower.start()
    try:
        yield [ours.recv()]
    finally:
        follower.kill()


def _follow(device: str, layout: KVLayout, pipe: Any) -> None:
    memory = raw_memory(torch.device(device), layout)
    pipe.send(memory.share())
    pipe.recv()


def _prefill(
    device: str, transport: str, layout: KVLayout, followers: Sequence[bytes], sizes: tuple[int, int], ours: Any
) -> list[ResultRow]:
    with node_of(PREFILL, device, transport, layout, followers) as (node, pool, events):
        (fill if is_narrow(layout) else fill_values)(pool)
        address, free = ours.recv(), [torch.cuda.mem_get_info()[0]]
        prefill = Prefill(node, pool, events, WorkerRef(DECODE, Incarnation("1"), "", address))
        rows = []
        for num_pages in SIZES if transport in ("ucx", "nvlink") else SIZES[:3]:
            rows.append(_row(prefill, num_pages, ours, layout, sizes))
        free.append(torch.cuda.mem_get_info()[0])
        node.close()
        free.append(torch.cuda.mem_get_info()[0])
        taken, kept = ((free[0] - left) / 2**20 for left in free[1:])
        return [*rows, ResultRow("link_memory", taken, "MiB", {"after_close": kept, "transport": transport})]


@contextmanager
def node_of(
    name: WorkerId, device: str, transport: str, layout: KVLayout, followers: Sequence[bytes]
) -> Iterator[tuple[TransferNode, DeviceTransferPool, Callable[[], Iterator[Any]]]]:
    """Yield a node, its pool, and a function that waits for its events."""
    sys.setswitchinterval(SWITCH_S)
    pool, woken = raw_pool(device, layout, followers), threading.Event()
    settings = TransferSettings(secret=SECRET, transport=transport)
    node = TransferNode(settings, name, Incarnation("1"), layout, pool, woken.set)

    def events() -> Iterator[Any]:
        while woken.wait(TIMEOUT_S):
            woken.clear()
            for event in node.poll():
                if isinstance(event, PeerDisconnected):
                    raise RuntimeError(event.error)
                yield event
        raise TimeoutError(f"{name} hears nothing")

    node.start()
    try:
        yield node, pool, events
    finally:
        node.close()


class Prefill:
    """The prefill end of the link, which hands over pages that it has."""

    def __init__(
        self, node: TransferNode, pool: DeviceTransferPool, events: Callable[[], Iterator[Any]], peer: WorkerRef
    ) -> None:
        self._node, self._pool, self._peer = node, pool, peer
        self._events = events()
        self._num_handoffs = 0

    def hand_over(self, pages: Sequence[int]) -> tuple[float, float]:
        """Hand over the pages; return when it began and ended.

        The checksums are taken before, as they are in an engine while pages are computed.
        """
        self._num_handoffs += 1
        request_id, epoch = RequestId(f"r{self._num_handoffs}"), Epoch(1)
        blocks = [BlockId(page) for page in pages]
        parts = [blocks[at : at + CHUNK_PAGES] for at in range(0, len(blocks), CHUNK_PAGES)]
        sums = [self._pool.checksums(part).wait() for part in parts]
        self._node.offer(self._peer, Offer(request_id, epoch, len(blocks) * LAYOUT.block_size, LAYOUT.layout_id))
        self._hear(Grant)
        begin, first = time.perf_counter(), 0
        for index, (part, found) in enumerate(zip(parts, sums, strict=True)):
            num_tokens = len(part) * LAYOUT.block_size
            self._node.send_chunk(DECODE, request_id, epoch, index, first, num_tokens, part, found)
            first += num_tokens
        self._hear(Commit)
        return begin, time.perf_counter()

    def detail(self) -> str:
        return self._node.stats()[0].detail

    def _hear(self, kind: type) -> None:
        next(event for event in self._events if isinstance(event, MessageReceived) and isinstance(event.message, kind))


def _row(prefill: Prefill, num_pages: int, decode: Any, layout: KVLayout, sizes: tuple[int, int]) -> ResultRow:
    rng, times, commits, pages = random.Random(num_pages), [], [], []
    for _ in range(NUM_TURNS + NUM_WARM):
        pages = rng.sample(range(RAW_BLOCKS), num_pages)
        begin, end = prefill.hand_over(pages)
        times.append(decode.recv() - begin)
        commits.append(end - begin)
    decode.send((pages, is_narrow(layout)))
    assert decode.recv(), "a page differs"
    nbytes, median = num_pages * LAYOUT.block_nbytes, statistics.median(times[NUM_WARM:])
    params = {"tokens": num_pages * LAYOUT.block_size, "MiB": nbytes >> 20, "checksum": True}
    params |= {
        "from": layout.only_group.dtype,
        "ms": round(median * 1e3, 4),
        "slowest_ms": round(max(times[NUM_WARM:]) * 1e3, 4),
    }
    params |= {"shards": "{} to {}".format(*sizes)} if sizes != (1, 1) else {}
    params |= {"ms_to_commit": round(statistics.median(commits[NUM_WARM:]) * 1e3, 4), "way": prefill.detail()}
    return ResultRow("handoff_staged", nbytes / median / 1e9, "GB/s", params, NVLINK_RATE / 1e9)


def _decode(device: str, transport: str, layout: KVLayout, followers: Sequence[bytes], pipe: Any) -> None:
    """Grant what is offered, commit what has landed, and compare pages on demand."""
    with node_of(DECODE, device, transport, layout, followers) as (node, pool, events):
        rng, into, missing = random.Random(0), [], 0
        granted: list[list[BlockId]] = [[]]
        pipe.send(node.address)
        threading.Thread(target=_compare, args=(pipe, pool, granted), daemon=True).start()
        for event in events():
            match event:
                case MessageReceived(peer_id, Offer(request_id, epoch, num_tokens)):
                    missing = num_tokens
                    into = [BlockId(page) for page in rng.sample(range(RAW_BLOCKS), num_tokens // LAYOUT.block_size)]
                    node.grant(peer_id, Grant(request_id, epoch, [into], 0))
                case ChunkLanded(peer_id, header):
                    missing -= header.num_tokens
                    if not missing:
                        here = time.perf_counter()  # all processes of a host share this clock
                        granted[0] = into
                        num_chunks, nbytes = header.index + 1, len(into) * LAYOUT.block_nbytes
                        node.commit(peer_id, Commit(header.request_id, header.epoch, num_chunks, nbytes))
                        pipe.send(here)


def _compare(pipe: Any, pool: DeviceTransferPool, granted: list[list[BlockId]]) -> None:
    while True:
        pages, as_they_were = pipe.recv()
        pool.enter()
        pipe.send((holds if as_they_were else holds_rounded)(pool, pages, granted[0]))
