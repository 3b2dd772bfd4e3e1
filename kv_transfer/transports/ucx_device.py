"""UCX between devices: a chunk is packed into the device's memory, one message takes it to the peer's, and there it is
unpacked.

* the receiver reads the sender's staging (get_zcopy: over NVLink by cuda_ipc, or RDMA): nobody else writes to a
  receiver's memory, so what a killed sender had under way ends with the receiver's own copies.
* UCX takes the host's memory without a word where it can't (containers that share no PID namespace, say). So the sender
  moves each slot to and fro when the channel opens, asks UCX how it does it, and tells the receiver: `detail`.
* waiting in epoll costs 2 to 4 ms a message with cuda_ipc (two H200); so the data threads look again and again
  while messages are under way, with naps if the owner computes, and sleep in epoll otherwise.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from socket import socket

import msgspec
import numpy as np

from contracts.errors import PeerLost, TransferError
from kv_transfer.device import Buffer, DevicePool
from kv_transfer.piece import META_NBYTES, read_meta
from kv_transfer.transports.base import DeviceChannel, Inbound, Opening, Outbound, Ring, Slot
from kv_transfer.transports.ucx import CONFIG, Engine, Sending, UcxChannel
from kv_transfer.transports.ucx_messages import Offered, Offering, Operation, fetch_into, send_from

log = logging.getLogger(__name__)

DEVICE_CONFIG = {**CONFIG, "RNDV_SCHEME": "get_zcopy"}
NUM_SLOTS, SLOT_NBYTES = 3, 128 << 20
MAX_STAGING_NBYTES = 1 << 30
NAP_S = 50e-6
PATIENCE_S = 0.005
"""Who has waited so long for a message can wait a nap longer."""
_DIRECT = "zero-copy read from remote"
_MEMORY_TYPES = {"cpu": 0, "cuda": 1}


class Proposal(msgspec.Struct, frozen=True):
    """What the sender's end says. `unit_nbytes`: of a block, all planes; messages are cut at blocks."""

    address: bytes
    num_slots: int
    slot_nbytes: int
    unit_nbytes: int


class UcxDeviceTransport:
    """`is_busy`: the owner computes, and a thread that does not sleep would be in its way."""

    name = "ucx"

    def __init__(self, pool: DevicePool, is_busy: Callable[[], bool]) -> None:
        self._pool, self._is_busy = pool, is_busy

    def open(self, session: bytes, ring: Ring, connect: Callable[[], socket]) -> Opening:
        """Raises TransferError if UCX does not start, or the device has no memory for staging."""
        unit_nbytes = self._pool.num_planes * self._pool.page_nbytes
        ours = Ring(NUM_SLOTS, max(SLOT_NBYTES // unit_nbytes, 1) * unit_nbytes, ring.stall_timeout_s)
        return _Opening(DeviceEngine(ours, self._is_busy), self._pool, unit_nbytes)

    def accept(
        self, session: bytes, ring: Ring, params: bytes, attached: Callable[[], socket]
    ) -> tuple[Inbound, bytes]:
        """Raises TransferError as `open`, and if the peer does not stage as we do."""
        asked = self._checked(params)
        theirs = Ring(asked.num_slots, asked.slot_nbytes, ring.stall_timeout_s)
        engine = DeviceEngine(theirs, self._is_busy)
        engine.connect(asked.address)
        return UcxDeviceInbound(engine, self._pool), engine.address

    def close(self) -> None:
        pass

    def _checked(self, params: bytes) -> Proposal:
        try:
            asked = msgspec.msgpack.decode(params, type=Proposal)
        except msgspec.DecodeError as error:
            raise TransferError(f"the peer does not say how it stages: {error}") from error
        if asked.unit_nbytes != self._pool.num_planes * self._pool.page_nbytes:
            raise TransferError(f"the peer's blocks have {asked.unit_nbytes} bytes")
        if asked.num_slots <= 0 or asked.slot_nbytes <= 0 or asked.num_slots * asked.slot_nbytes > MAX_STAGING_NBYTES:
            raise TransferError(f"staging of {asked.num_slots} x {asked.slot_nbytes} bytes is out of bounds")
        return asked


class _Opening:
    def __init__(self, engine: "DeviceEngine", pool: DevicePool, unit_nbytes: int) -> None:
        self._engine, self._pool = engine, pool
        ours = Proposal(engine.address, engine.ring.num_slots, engine.ring.slot_nbytes, unit_nbytes)
        self.params = msgspec.msgpack.encode(ours)

    def finish(self, answer: bytes) -> Outbound:
        self._engine.connect(answer)
        return UcxDeviceOutbound(self._engine, self._pool)

    def cancel(self) -> None:
        self._engine.close()


class DeviceEngine(Engine):
    """Sleeps in epoll while nothing is under way."""

    def __init__(self, ring: Ring, is_busy: Callable[[], bool]) -> None:
        super().__init__(ring, DEVICE_CONFIG)
        self._is_busy, self._moved_s = is_busy, 0.0

    def moved(self) -> None:
        """As Engine's: the next message may be done soon."""
        self._moved_s = time.monotonic()

    def sleep(self, deadline: float | None) -> None:
        if not self.operations:
            super().sleep(deadline)
            return
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            raise PeerLost("the peer took nothing until the deadline")
        if self._is_busy() or now - self._moved_s > PATIENCE_S:
            time.sleep(NAP_S)


@dataclass(frozen=True, slots=True)
class DeviceSlot(Slot):
    """`buffer`: the meta alone, on the host."""

    memory: Buffer

    @property
    def payload(self) -> Buffer:
        return self.memory


class _DeviceChannel(UcxChannel, DeviceChannel):
    def __init__(self, engine: DeviceEngine, pool: DevicePool) -> None:
        super().__init__(engine)
        self.pool, self.slot_nbytes = pool, engine.ring.slot_nbytes
        self._memory_type, self._lent = _MEMORY_TYPES[pool.kind], []
        pool.enter()
        try:
            for _ in range(engine.ring.num_slots):
                self._lent.append(pool.lend(self.slot_nbytes))
        except TransferError:
            self.close()
            raise

    def close(self) -> None:
        """Staging that UCX has not let go of is kept for good."""
        self.pool.enter()
        self._engine.close()
        if self._engine.worker is None:
            for buffer in self._lent:
                self.pool.take_back(buffer)
            self._lent = []


class UcxDeviceOutbound(_DeviceChannel):
    def __init__(self, engine: DeviceEngine, pool: DevicePool) -> None:
        super().__init__(engine, pool)
        metas = [np.zeros(META_NBYTES, dtype=np.uint8) for _ in self._lent]
        slots = [DeviceSlot(i, meta, buffer) for i, (meta, buffer) in enumerate(zip(metas, self._lent, strict=True))]
        self._sending = Sending(engine, slots)
        try:
            self._try_out()
        except PeerLost:
            self.close()
            raise

    def acquire(self) -> Slot:
        return self._sending.unused().popleft()

    def send(self, slot: Slot, nbytes: int) -> None:
        assert isinstance(slot, DeviceSlot)
        self._engine.require_open()
        self._start(slot, slot.buffer, nbytes)

    def flush(self) -> None:
        self._sending.flush()

    def _start(self, slot: Slot, header: np.ndarray, nbytes: int) -> Operation:
        operation = send_from(self._engine.endpoint.handle, header, slot.payload, nbytes, self._memory_type)
        self._sending.sent(slot, operation)
        return operation

    def _try_out(self) -> None:
        """Each slot twice: UCX registers and maps it now, and not under a handoff. Then tell the receiver."""
        ways, took_s = [""], []
        for _ in range(2 * self._engine.ring.num_slots):
            begin = time.perf_counter()
            operation = self._start(self.acquire(), _NO_WORDS, self.slot_nbytes)
            ways.append(operation.way)
            self.flush()
            took_s.append(time.perf_counter() - begin)
        way, rate = max(ways, key=len), self.slot_nbytes / min(took_s) / 1e9
        # UCX adds what it expects: "... 12.0 MB/s 83610.13 us".
        words = f"{way.partition(' MB/s')[0].rpartition(' ')[0] or 'a way unknown'}, {rate:.0f} GB/s"
        self._start(self.acquire(), np.frombuffer(words.encode(), dtype=np.uint8)[: META_NBYTES - 1], 0)
        self.flush()
        self._detail = told(self._detail, words, self.pool)


class UcxDeviceInbound(_DeviceChannel):
    """Messages wait with UCX until there is a slot to fetch them into."""

    def __init__(self, engine: DeviceEngine, pool: DevicePool) -> None:
        super().__init__(engine, pool)
        self._unused = deque(self._lent)
        self._offered: deque[Offered] = deque()
        self._headers: deque[np.ndarray] = deque()
        self._offering = Offering(engine.worker.handle, self._offered.append)

    def receive(self, take: Callable[[Slot], None]) -> None:
        while True:
            self._engine.until(self._is_there, None)
            operation, header = self._engine.operations.popleft(), self._headers.popleft()
            self._engine.moved()
            if operation.error:
                raise PeerLost(f"UCX could not fetch a message: {operation.error}")
            try:
                if len(header) == META_NBYTES:
                    self._give(take, header, operation)
                    return
                if len(header):
                    self._detail = told(self._detail, header.tobytes().decode(errors="replace"), self.pool)
            finally:
                self._unused.append(operation.buffer)

    def _give(self, take: Callable[[Slot], None], header: np.ndarray, operation: Operation) -> None:
        if read_meta(header).nbytes != operation.nbytes:
            raise PeerLost(f"a message of {operation.nbytes} bytes says that it is another")
        take(DeviceSlot(0, header, operation.buffer))

    def _is_there(self) -> bool:
        """Whether the oldest message is in a slot. Has the next ones fetched."""
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


def told(detail: str, words: str, pool: DevicePool) -> str:
    """`detail` with what the sender has found out. Loud if the bytes of a device do not go there directly."""
    if pool.kind != "cpu" and _DIRECT not in words:
        log.warning("UCX moves the KV of this link through the host's memory: %s", words)
    else:
        log.info("UCX moves the KV of this link by %s", words)
    return f"{detail}; {words}"


_NO_WORDS = np.zeros(0, dtype=np.uint8)
