"""The transport by UCX between devices: chunks are packed, sent and unpacked in the devices' memory.

* The receiver reads the sender's staging (get_zcopy: over NVLink by cuda_ipc, or RDMA): no other process writes to a
  receiver's memory, so what a killed sender had under way ends with the receiver's own copies.
* UCX silently goes through the host's memory where it has no direct path (containers that share no PID namespace, say).
  So the sender moves each slot twice when the channel opens, asks UCX how it does so, and sends that to the receiver:
  `detail`.
* Waiting in epoll costs 2 to 4 ms a message with cuda_ipc (two H200), and being woken from it for the first one 0.2:
  the data threads poll, with naps in between, while messages are under way, or expected by a process that computes
  nothing meanwhile, and sleep in epoll otherwise. Without naps they would disturb all other threads: an interpreter has
  one lock.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from socket import socket

import msgspec
import numpy as np

from contracts.errors import PeerLost, TransferError
from kv_transfer.chunks.device_pool import Buffer, DevicePool
from kv_transfer.chunks.wire_format import META_NBYTES, read_meta
from kv_transfer.transports.base import (
    ChannelOffer,
    DeviceChannel,
    DeviceInbound,
    Inbound,
    Outbound,
    Ring,
    Slot,
    Take,
    Taking,
)
from kv_transfer.transports.device_slots import Arena, Lease
from kv_transfer.transports.staging_budget import NUM_SLOTS, SLOT_NBYTES, Allowance
from kv_transfer.transports.stall_limit import StallLimit
from kv_transfer.transports.ucx import CONFIG, Sending, UcxChannel, UcxWorker
from kv_transfer.transports.ucx_messages import Offered, Offering, Operation, fetch_into, send_from

log = logging.getLogger(__name__)

DEVICE_CONFIG = {**CONFIG, "RNDV_SCHEME": "get_zcopy"}
NAP_S, LONG_NAP_S = 20e-6, 500e-6
PATIENCE_S = 0.25
"""The seconds without progress after which naps become long."""
_DIRECT = "zero-copy read from remote"
_MEMORY_TYPES = {"cpu": 0, "cuda": 1}


class Proposal(msgspec.Struct, frozen=True):
    """The address and slot size of each end. Messages are no longer than either's slots."""

    address: bytes
    slot_nbytes: int


class UcxDeviceTransport:
    """The transport by UCX for pools in a device's memory."""

    name = "ucx"

    def __init__(self, pools: Sequence[DevicePool]) -> None:
        self._arena = Arena(pools, Allowance())

    def open(self, session: bytes, ring: Ring, connect: Callable[[], socket]) -> ChannelOffer:
        """Offer a channel. Raises TransferError if UCX does not start, or the device lacks memory for staging."""
        return _UcxDeviceOffer(*self._start(ring, SLOT_NBYTES))

    def accept(
        self, session: bytes, ring: Ring, params: bytes, attached: Callable[[], socket]
    ) -> tuple[Inbound, bytes]:
        """Accept a channel. Raises TransferError as `open` does."""
        peer = _read(params)
        engine, lease = self._start(ring, peer.slot_nbytes)
        try:
            engine.connect(peer.address)
        except TransferError:
            lease.end()
            raise
        answer = Proposal(engine.address, lease.slot_nbytes)
        return UcxDeviceInbound(engine, lease), msgspec.msgpack.encode(answer)

    def close(self) -> None:
        self._arena.close()

    def _start(self, ring: Ring, most_nbytes: int) -> "tuple[UcxDeviceWorker, Lease]":
        engine = UcxDeviceWorker(ring)
        try:
            return engine, Lease(self._arena, most_nbytes)
        except TransferError:
            engine.close()
            raise


class _UcxDeviceOffer:
    def __init__(self, engine: "UcxDeviceWorker", lease: Lease) -> None:
        self._engine, self._lease = engine, lease
        self.params = msgspec.msgpack.encode(Proposal(engine.address, lease.slot_nbytes))

    def finish(self, answer: bytes) -> Outbound:
        """Connect and try the channel out. Raises TransferError if it does not work."""
        try:
            theirs = _read(answer)
            self._engine.connect(theirs.address)
        except TransferError:
            self.cancel()
            raise
        return UcxDeviceOutbound(self._engine, self._lease, theirs.slot_nbytes)

    def cancel(self) -> None:
        self._engine.close()
        self._lease.end()


def _read(params: bytes) -> Proposal:
    try:
        said = msgspec.msgpack.decode(params, type=Proposal)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransferError(f"the peer does not say how it stages: {error}") from error
    if said.slot_nbytes <= 0:
        raise TransferError(f"the peer's slots have {said.slot_nbytes} bytes")
    return said


class UcxDeviceWorker(UcxWorker):
    """A UCX worker that sleeps in epoll while nothing is under way or due. Its user sets `is_due`."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring, DEVICE_CONFIG)
        self.is_due, self._moved_s = _never, 0.0

    def moved(self) -> None:
        """Note that an operation has begun or ended: the next message may be there, or done, soon."""
        self._moved_s = time.monotonic()

    def sleep(self, limit: StallLimit | None) -> None:
        if not self.operations and not self.is_due():
            super().sleep(limit)
            return
        now = time.monotonic()
        if limit is not None and limit.next_wait_s() == 0.0:
            raise PeerLost("the peer took nothing until the deadline")
        time.sleep(NAP_S if now - self._moved_s < PATIENCE_S else LONG_NAP_S)


@dataclass(frozen=True, slots=True)
class DeviceSlot(Slot):
    """A slot whose payload is in the device's memory. `buffer`: the meta alone, on the host."""

    memory: Buffer

    @property
    def payload(self) -> Buffer:
        return self.memory


class _DeviceChannel(UcxChannel, DeviceChannel):
    _engine: UcxDeviceWorker

    def __init__(self, engine: UcxDeviceWorker, lease: Lease) -> None:
        super().__init__(engine)
        self.pools, self.slot_nbytes, self._lease = lease.pools, lease.slot_nbytes, lease
        self._memory_type = _MEMORY_TYPES[self.pool.kind]

    def close(self) -> None:
        """Close the channel. Staging that UCX has not let go of is never freed."""
        self.pool.enter()
        self._engine.close()
        if self._engine.worker is None:
            self._lease.end()


class UcxDeviceOutbound(_DeviceChannel):
    """The sender's end, tried out when made.

    Raises TransferError, with everything freed, if it does not work.
    """

    def __init__(self, engine: UcxDeviceWorker, lease: Lease, most_nbytes: int) -> None:
        super().__init__(engine, lease)
        self.slot_nbytes = min(lease.slot_nbytes, most_nbytes)
        metas = [np.zeros(META_NBYTES, dtype=np.uint8) for _ in lease.buffers]
        slots = [DeviceSlot(i, meta, buffer) for i, (meta, buffer) in enumerate(zip(metas, lease.buffers, strict=True))]
        self._sending = Sending(engine, slots)
        try:
            self._try_out(time.monotonic() + engine.ring.trial_timeout_s)
        except TransferError as error:
            self.close()
            raise TransferError(f"what was sent to try it out did not arrive: {error}") from error

    def acquire(self) -> Slot:
        return self._sending.unused().popleft()

    def send(self, slot: Slot, nbytes: int) -> None:
        assert isinstance(slot, DeviceSlot)
        self._engine.require_open()
        self._start(slot, slot.buffer, nbytes)

    def flush(self) -> None:
        self._sending.flush()

    def _arrive(self, operation: Operation, deadline: float) -> None:
        self._engine.until(lambda: operation.is_done, max(deadline - time.monotonic(), 0.0))
        self.flush()

    def _start(self, slot: Slot, header: np.ndarray, nbytes: int) -> Operation:
        operation = send_from(self._engine.endpoint.handle, header, slot.payload, nbytes, self._memory_type)
        self._sending.sent(slot, operation)
        return operation

    def _try_out(self, deadline: float) -> None:
        """Send each slot twice, then report to the receiver how UCX moved them.

        UCX registers and maps the slots now, and not during a handoff.
        """
        paths, took_s = [""], list[float]()
        for _ in range(2 * NUM_SLOTS):
            begin = time.perf_counter()
            operation = self._start(self.acquire(), _NO_WORDS, self.slot_nbytes)
            paths.append(operation.path)
            self._arrive(operation, deadline)
            took_s.append(time.perf_counter() - begin)
        path, rate = max(paths, key=len), self.slot_nbytes / min(took_s) / 1e9
        # UCX adds what it expects: "... 12.0 MB/s 83610.13 us".
        words = f"{path.partition(' MB/s')[0].rpartition(' ')[0] or 'an unknown path'}, {rate:.0f} GB/s"
        report = self._start(self.acquire(), np.frombuffer(words.encode(), dtype=np.uint8)[: META_NBYTES - 1], 0)
        self._arrive(report, deadline)
        self.is_direct = is_direct(words, self.pool)
        self._detail = with_path(self._detail, words, self.pool)


class UcxDeviceInbound(_DeviceChannel, DeviceInbound):
    """The receiver's end. Messages wait in UCX until there is a slot to fetch them into."""

    def __init__(self, engine: UcxDeviceWorker, lease: Lease) -> None:
        super().__init__(engine, lease)
        self._unused, self._is_tried = deque(lease.buffers), False
        self._taken: deque[tuple[Buffer, Taking]] = deque()
        self._is_expected, engine.is_due = _never, self._is_due
        self._offered: deque[Offered] = deque()
        self._headers: deque[np.ndarray] = deque()
        self._offering = Offering(engine.worker.handle, self._offered.append)

    def receive(self, take: Take) -> None:
        """Take messages. While one is unpacked the next ones are fetched, and taken too."""
        try:
            self._give_next(take)
        except BaseException:
            with ExitStack() as waits:  # the device writes to the pages even if this end has failed
                for _, taking in self._taken:
                    waits.callback(taking.unpacking.wait)
            raise

    def expect(self, is_due: Callable[[], bool]) -> None:
        self._is_expected = is_due
        self._engine.moved()
        self._engine.rouse()

    def be_tried(self, goes_on: Callable[[], bool]) -> None:
        """Take the sender's trial. What it has sent without waiting may come later: `receive` takes it too."""
        while not self._is_tried and goes_on():
            self._engine.require_open()
            has_moved = self._engine.worker.progress_once()
            if self._is_there():
                self._take_next(_refuse_chunk)
            elif not has_moved:
                time.sleep(NAP_S)

    def _give_next(self, take: Take) -> None:
        is_given = False
        while not is_given:
            self._engine.until(lambda: self._is_there() or self._is_unpacked(), None)
            if self._is_unpacked():
                self._let_go()
            else:
                is_given = self._take_next(take)

    def _is_due(self) -> bool:
        return bool(self._taken) or self._is_expected()

    def _is_unpacked(self) -> bool:
        """Return whether the oldest message that was taken is in its pages."""
        return bool(self._taken) and self._taken[0][1].unpacking.is_done

    def _let_go(self) -> None:
        buffer, taking = self._taken.popleft()
        self._unused.append(buffer)
        taking.finish()

    def _take_next(self, take: Take) -> bool:
        """Take the oldest message, and return whether it was a segment.

        The others belong to the trial, and the last of them describes its result.
        """
        operation, header = self._engine.operations.popleft(), self._headers.popleft()
        self._engine.moved()
        if operation.error:
            raise PeerLost(f"UCX could not fetch a message: {operation.error}")
        is_given = len(header) == META_NBYTES
        taking = self._give(take, header, operation) if is_given else None
        if not is_given and len(header):
            self._is_tried = True
            self._detail = with_path(self._detail, header.tobytes().decode(errors="replace"), self.pool)
        if taking is None:
            self._unused.append(operation.buffer)
        else:
            self._taken.append((operation.buffer, taking))
        return is_given

    def _give(self, take: Take, header: np.ndarray, operation: Operation) -> Taking | None:
        if read_meta(header).nbytes != operation.nbytes:
            raise PeerLost(f"a message of {operation.nbytes} bytes says that it is another")
        return take(DeviceSlot(0, header, operation.buffer))

    def _is_there(self) -> bool:
        """Return whether the oldest message is in a slot. Starts to fetch the next ones."""
        while self._offered and self._unused:
            self._fetch(self._offered.popleft())
        return bool(self._engine.operations) and self._engine.operations[0].is_done

    def _fetch(self, offered: Offered) -> None:
        if offered.nbytes > self.slot_nbytes:
            raise PeerLost(f"a message of {offered.nbytes} bytes; a slot has {self.slot_nbytes}")
        buffer = self._unused.popleft()
        self._headers.append(offered.header)
        if offered.message is not None:
            where = self._engine.worker.handle, offered.message
            self._engine.operations.append(fetch_into(*where, buffer, offered.nbytes, self._memory_type))
            self._engine.moved()
            return
        assert offered.data is not None
        buffer.put(offered.data)
        self._engine.operations.append(Operation(buffer, offered.nbytes, None))


def is_direct(words: str, pool: DevicePool) -> bool:
    """Return whether bytes pass no host's memory, by UCX's words; those of a host's pool always count so."""
    return pool.kind == "cpu" or _DIRECT in words


def with_path(detail: str, words: str, pool: DevicePool) -> str:
    """Return `detail` with the sender's finding, logging a warning if the path is not direct."""
    if not is_direct(words, pool):
        log.warning("UCX moves the KV of this link through the host's memory: %s", words)
    else:
        log.info("UCX moves the KV of this link by %s", words)
    return f"{detail}; {words}"


def _never() -> bool:
    return False


def _refuse_chunk(slot: Slot) -> None:
    raise PeerLost("a chunk came before the handshake was over")


_NO_WORDS = np.zeros(0, dtype=np.uint8)
