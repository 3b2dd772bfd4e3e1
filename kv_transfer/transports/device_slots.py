"""The staging of links in a device's memory: slots that one link leases after another."""

import threading
from collections.abc import Sequence

from contracts.errors import TransferError
from kv_transfer.chunks.device_pool import Buffer, DevicePool
from kv_transfer.transports.staging_budget import NUM_SLOTS, Allowance


class Slots:
    """The slots of a link, in the memory of the pools' device.

    Each holds a block of the largest group at least. Raises TransferError if there is no memory for them.
    """

    def __init__(self, pools: Sequence[DevicePool], allowance: Allowance, most_nbytes: int) -> None:
        self.pools, self.pool, self._allowance = pools, pools[0], allowance
        self.slot_nbytes = allowance.take(max(pool.block_nbytes for pool in pools), most_nbytes)
        self.buffers: list[Buffer] = []
        self.pool.enter()
        try:
            for _ in range(NUM_SLOTS):
                self.buffers.append(self.pool.allocate(self.slot_nbytes))
        except TransferError:
            self.free()
            raise

    def free(self) -> None:
        """Free the slots, which nothing uses any more."""
        self.pool.enter()
        for buffer in self.buffers:
            self.pool.free(buffer)
        self._allowance.give_back(self.slot_nbytes)


class Arena:
    """The slots of all links of a core, freed when the core ends.

    The next link takes over the slots of one that has ended: a peer that has read them by cuda_ipc keeps them mapped,
    and memory that is freed then stays in use while the peer lives (seen on two H200).
    """

    def __init__(self, pools: Sequence[DevicePool], allowance: Allowance) -> None:
        self._pools, self._allowance = pools, allowance
        self._unused: list[Slots] = []
        self._lock = threading.Lock()

    def take(self, most_nbytes: int) -> Slots:
        """Return unused slots, or new ones. Raises TransferError if there is no memory for them."""
        with self._lock:
            if self._unused:
                best = max(self._unused, key=lambda slots: slots.slot_nbytes)
                self._unused.remove(best)
                return best
        return Slots(self._pools, self._allowance, most_nbytes)

    def give_back(self, slots: Slots) -> None:
        """Take back slots that nothing uses any more."""
        with self._lock:
            self._unused.append(slots)

    def close(self) -> None:
        with self._lock:
            for slots in self._unused:
                slots.free()
            self._unused.clear()


class Lease:
    """A lease of slots by one link."""

    def __init__(self, arena: Arena, most_nbytes: int) -> None:
        self._arena, self._slots = arena, arena.take(most_nbytes)
        self.pools, self.slot_nbytes, self.buffers = self._slots.pools, self._slots.slot_nbytes, self._slots.buffers
        self._is_over = False

    def end(self) -> None:
        """Give back the slots, which nothing uses any more. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._arena.give_back(self._slots)
