"""A transport whose two ends are in one process: a ring of arrays, for tests of all above it."""

import threading
from collections import deque
from collections.abc import Callable
from socket import socket

import numpy as np

from contracts.errors import PeerLost, TransferError
from kv_transfer.transports.base import ChannelOffer, Inbound, Outbound, Ring, Slot, Take

# One process is exactly how far a loopback reaches, so the meeting place of its two ends is the module.
_rings: dict[bytes, "MemoryRing"] = {}


class LoopbackTransport:
    """A transport that stands in for tcp, by its name: a node is given it at both ends."""

    name = "tcp"

    def open(self, session: bytes, ring: Ring, connect: Callable[[], socket]) -> ChannelOffer:
        return _LoopbackOffer(session, MemoryRing(ring))

    def accept(
        self, session: bytes, ring: Ring, params: bytes, attached: Callable[[], socket]
    ) -> tuple[Inbound, bytes]:
        memory = _rings.get(session)
        if memory is None:
            raise TransferError("loopback reaches no further than one process")
        return LoopbackInbound(memory), b""

    def close(self) -> None:
        pass


class MemoryRing:
    """Slots that are free, and slots that are full, in order."""

    def __init__(self, ring: Ring) -> None:
        slots = (Slot(i, np.zeros(ring.stride, dtype=np.uint8)) for i in range(ring.num_slots))
        self.free, self.full = deque(slots), deque[Slot]()
        self.stall_timeout_s = ring.stall_timeout_s
        self.broken = False
        self.changed = threading.Condition()

    def take(self, slots: deque[Slot], timeout_s: float | None) -> Slot:
        with self.changed:
            if not self.changed.wait_for(lambda: bool(slots) or self.broken, timeout_s):
                raise PeerLost(f"the peer took nothing for {timeout_s} s")
            if self.broken:
                raise PeerLost("the loopback was closed")
            return slots.popleft()

    def put(self, slots: deque[Slot], slot: Slot) -> None:
        with self.changed:
            if self.broken:
                raise PeerLost("the loopback was closed")
            slots.append(slot)
            self.changed.notify_all()

    def break_off(self) -> None:
        with self.changed:
            self.broken = True
            self.changed.notify_all()


class _LoopbackOffer:
    params = b""

    def __init__(self, session: bytes, memory: MemoryRing) -> None:
        self._session, self._memory = session, memory
        _rings[session] = memory

    def finish(self, answer: bytes) -> Outbound:
        del _rings[self._session]
        return LoopbackOutbound(self._memory)

    def cancel(self) -> None:
        del _rings[self._session]


class _LoopbackChannel:
    detail = "one process"

    def __init__(self, memory: MemoryRing) -> None:
        self._memory = memory

    def interrupt(self) -> None:
        self._memory.break_off()

    close = interrupt


class LoopbackOutbound(_LoopbackChannel):
    def acquire(self) -> Slot:
        return self._memory.take(self._memory.free, self._memory.stall_timeout_s)

    def send(self, slot: Slot, nbytes: int) -> None:
        self._memory.put(self._memory.full, slot)

    def flush(self) -> None:
        pass


class LoopbackInbound(_LoopbackChannel):
    def receive(self, take: Take) -> None:
        slot = self._memory.take(self._memory.full, None)
        take(slot)
        self._memory.put(self._memory.free, slot)
