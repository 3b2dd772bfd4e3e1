"""The contract of a channel, over each transport: size x memory x asked for before or after x the peer goes."""

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from contracts.errors import PeerLost, TransferError
from contracts.handoff import ChunkHeader
from contracts.ids import Epoch, RequestId
from kv_transfer.chunks.wire_format import KVSegment, read_meta, write_meta
from kv_transfer.transports.base import Inbound, Outbound, Ring, Slot
from kv_transfer.transports.registry import Transports
from testing.loopback_transport import LoopbackTransport
from tests.kv_transfer.conftest import STAGED

RING = Ring(num_slots=3, slot_nbytes=1 << 20, stall_timeout_s=30.0)
IMPATIENT = Ring(num_slots=3, slot_nbytes=1 << 20, stall_timeout_s=0.5)
SESSION = bytes(range(16))


@pytest.fixture(params=STAGED)
def transport(request: pytest.FixtureRequest) -> str:
    """Those that carry messages."""
    return request.param


class Ends:
    """Both ends of one channel; used like the data threads do, one thread an end."""

    def __init__(self, out: Outbound, inn: Inbound) -> None:
        self.out, self.inn = out, inn
        self._taken: deque[tuple[int, np.ndarray]] = deque()

    def send(self, number: int, data: np.ndarray) -> None:
        slot = self.out.acquire()
        header = ChunkHeader(RequestId("r"), Epoch(1), number, 0, 1, "id", len(data), number)
        write_meta(KVSegment(header, 0, len(data)), slot.meta)
        slot.payload[: len(data)] = data
        self.out.send(slot, len(data))

    def send_all(self, parts: list[np.ndarray]) -> None:
        for number, part in enumerate(parts):
            self.send(number, part)
        self.out.flush()

    def receive(self) -> tuple[int, np.ndarray]:
        if not self._taken:
            self.inn.receive(self._take)
        return self._taken.popleft()

    def _take(self, slot: Slot) -> None:
        piece = read_meta(slot.meta)
        self._taken.append((piece.header.index, slot.payload[: piece.nbytes].copy()))


@pytest.fixture
def make_ends(transport: str, leftovers: None) -> Iterator[Callable[..., Ends]]:
    with ExitStack() as stack:
        transports = Transports({"loopback": LoopbackTransport()})
        stack.callback(transports.close)

        def make(ring: Ring = RING) -> Ends:
            left, right = _socket_pair()
            spare = [left, right]
            opening = transports.find(transport).open(SESSION, ring, lambda: spare.pop(0))
            inn, answer = transports.find(transport).accept(SESSION, ring, opening.params, lambda: spare.pop(0))
            ends = Ends(opening.finish(answer), inn)
            for closing in (*spare, ends.out, ends.inn):
                stack.callback(closing.close)
            return ends

        yield make


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


def _in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list]:
    """Runs beside; what it returned or raised is in the list after the join."""
    result: list = []

    def run() -> None:
        try:
            result.append(work())
        except TransferError as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


def _parts(memory: str, nbytes: int, count: int) -> list[np.ndarray]:
    """`memory`: "whole" arrays, or "strided" views with gaps."""
    step = 1 if memory == "whole" else 3
    source = np.random.default_rng(nbytes).integers(0, 256, (count, nbytes * step), dtype=np.uint8)
    return [row[::step] for row in source]


@pytest.mark.parametrize("nbytes", [1, 4096, 8191, 8193, 1 << 20])
@pytest.mark.parametrize("memory", ["whole", "strided"])
@pytest.mark.parametrize("asked", ["before", "after"])
def test_messages_arrive_whole_and_in_order(make_ends: Callable, nbytes: int, memory: str, asked: str) -> None:
    ends, parts = make_ends(), _parts(memory, nbytes, 7)

    def receive_all() -> list[tuple[int, np.ndarray]]:
        return [ends.receive() for _ in parts]

    jobs = [lambda: ends.send_all(parts), receive_all]
    threads = [_in_thread(job) for job in (jobs if asked == "after" else jobs[::-1])]
    for thread, _ in threads:
        thread.join(60)
    received = next(result[0] for _, result in threads if result[0] is not None)
    assert [number for number, _ in received] == list(range(7))
    assert all((data == part).all() for (_, data), part in zip(received, parts, strict=True))


@pytest.mark.parametrize("end", ["out", "inn"])
def test_interrupt_wakes_the_thread_that_waits(make_ends: Callable, end: str) -> None:
    ends = make_ends()
    work = ends.receive if end == "inn" else lambda: [ends.send_all([np.ones(1 << 20, np.uint8)]) for _ in range(99)]
    thread, result = _in_thread(work)
    thread.join(0.05)
    getattr(ends, end).interrupt()
    thread.join(60)
    assert not thread.is_alive() and isinstance(result[0], PeerLost)


@pytest.mark.parametrize("gone", ["out", "inn"])
def test_the_other_end_going_is_an_error_and_no_hang(make_ends: Callable, gone: str) -> None:
    ends = make_ends()
    exchange, _ = _in_thread(lambda: ends.send_all([np.ones(99, np.uint8)]))
    ends.receive()
    exchange.join(60)
    getattr(ends, gone).close()
    work = ends.receive if gone == "out" else lambda: [ends.send_all([np.ones(1 << 20, np.uint8)]) for _ in range(99)]
    thread, result = _in_thread(work)
    thread.join(60)
    assert not thread.is_alive() and isinstance(result[0], PeerLost)


def test_a_receiver_that_takes_nothing_stalls_the_sender_for_a_bounded_time(make_ends: Callable) -> None:
    ends = make_ends(IMPATIENT)
    with pytest.raises(PeerLost):
        for _ in range(99):
            ends.send_all([np.ones(1 << 20, np.uint8)])


def test_two_channels_do_not_mix(make_ends: Callable) -> None:
    first, second = make_ends(), make_ends()
    threads = [
        _in_thread(lambda ends=ends, value=value: ends.send_all([np.full(9000, value, np.uint8)] * 3))[0]
        for value, ends in enumerate((first, second))
    ]
    got = [ends.receive()[1][0] for _ in range(3) for ends in (first, second)]
    for thread in threads:
        thread.join(60)
    assert got == [0, 1] * 3
