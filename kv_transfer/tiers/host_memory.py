"""The tier in this host's memory: one allocation, in slots of a record each."""

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from contracts.held_prefixes import HeldPrefixes
from contracts.kv_store import BlockKey, BlockWorth
from kv_transfer.tiers.eviction_policy import EvictionPolicy
from kv_transfer.tiers.tier_stats import TierStats

LentRecord = tuple[int, memoryview]
"""A slot, and the record in it."""


class HostMemoryTier:
    """The records in an arena of `capacity_nbytes`.

    None is moved, and one that is being read is not overwritten.
    `allocate` returns the arena: bytearray, or memory that a device copies from faster. `block_size`: tokens of a
    block, for `held`.
    """

    name = "host"
    is_local = True
    is_on = True

    def __init__(
        self,
        capacity_nbytes: int,
        slot_nbytes: int,
        allocate: Callable[[int], memoryview] | None = None,
        block_size: int = 0,
    ) -> None:
        self.held, self._slot_nbytes = HeldPrefixes(block_size), slot_nbytes
        num_slots = capacity_nbytes // slot_nbytes
        if num_slots < 1:
            raise ValueError(f"{capacity_nbytes} bytes do not hold one block, of {slot_nbytes} bytes")
        # Copied by numpy, which lets other threads run meanwhile, as a copy of memoryviews does not.
        self._arena = np.frombuffer((allocate or _allocate)(num_slots * slot_nbytes), np.uint8)
        self._policy = EvictionPolicy(num_slots * slot_nbytes)
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[BlockKey, tuple[int, int]] = {}
        self._num_readers: dict[int, int] = {}
        self._freed_later: set[int] = set()
        self._stats = TierStats()
        self._lock = threading.Lock()

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        with self._lock:
            return next((index for index, key in enumerate(keys) if key not in self._slots), len(keys))

    def lend(self, keys: Sequence[BlockKey]) -> list[LentRecord]:
        """Return the records of `keys` where they lie, up to the first that is not held.

        They stay as they are until `give_back`.
        """
        with self._stats.load() as loading, self._lock:
            lent: list[LentRecord] = []
            for key in keys:
                if (found := self._slots.get(key)) is None:
                    break
                slot, nbytes = found
                self._num_readers[slot] = self._num_readers.get(slot, 0) + 1
                start = slot * self._slot_nbytes
                lent.append((slot, self._arena[start : start + nbytes].data))
            self._policy.use(keys[: len(lent)])
            loading.found([len(record) for _, record in lent], len(keys))
        return lent

    def give_back(self, slots: Iterable[int]) -> None:
        """End the reading of records that were lent."""
        with self._lock:
            for slot in slots:
                self._num_readers[slot] -= 1
                if not self._num_readers[slot]:
                    del self._num_readers[slot]
                    if slot in self._freed_later:
                        self._freed_later.discard(slot)
                        self._free.append(slot)

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[int]:
        lent = self.lend(keys)
        for (_, record), buffer in zip(lent, into, strict=False):
            np.frombuffer(buffer, np.uint8)[: len(record)] = np.frombuffer(record, np.uint8)
        self.give_back(slot for slot, _ in lent)
        return [len(record) for _, record in lent]

    def store(self, key: BlockKey, record: memoryview, worth: BlockWorth) -> bool:
        """Keep a record; see KVStore. False if it is larger than a slot or not worth what would have to go."""
        with self._lock:
            if len(record) > self._slot_nbytes or key in self._policy:  # held, or being written by another thread
                return key in self._slots
            for gone in self._policy.add(key, self._slot_nbytes, worth):
                self._stats.num_evicted += gone != key
                if gone in self._slots:
                    self.held.remove(gone)
                    self._free_slot(self._slots.pop(gone)[0])
            if key not in self._policy or not self._free:  # the slot that became free is still being read
                self._policy.remove(key)
                return False
            slot = self._free.pop()
        start = slot * self._slot_nbytes
        self._arena[start : start + len(record)] = np.frombuffer(record, np.uint8)
        with self._lock:
            if key not in self._policy:  # it had to go before it was there
                self._free.append(slot)
                return False
            self._slots[key] = slot, len(record)
            self.held.add(key, worth.num_blocks)
            self._stats.stored(len(record))
            return True

    def evict(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                if key in self._slots:
                    self.held.remove(key)
                    self._policy.remove(key)
                    self._free_slot(self._slots.pop(key)[0])

    def stats(self) -> dict[str, float]:
        with self._lock:
            return self._stats.report(len(self._slots), len(self._slots) * self._slot_nbytes)

    def close(self) -> None:
        """Keep what there is: the memory goes with the process."""

    def _free_slot(self, slot: int) -> None:
        if slot in self._num_readers:
            self._freed_later.add(slot)
        else:
            self._free.append(slot)


def _allocate(nbytes: int) -> memoryview:
    """Return memory that was written once, so that the system has it: it runs short, if it does, at start."""
    return memoryview(bytearray(b"\1") * nbytes)
