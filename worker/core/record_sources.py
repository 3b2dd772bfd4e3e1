"""The records of a load in page-locked memory, in order, some of them ahead of their use."""

import queue
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import Protocol

from contracts.kv_store import BlockKey, KVStore
from kv_transfer.tiers.host_memory import HostMemoryTier

HeldRecord = tuple[int, memoryview]
"""What gives it back, and the record."""


class RecordSource(Protocol):
    """The records of one tier for one thread."""

    def batches(self, keys: Sequence[BlockKey], size: int) -> Generator[list[HeldRecord], None, None]:
        """Yield the records of `keys`, at most `size` at a time, up to the first that is not there.

        The caller gives each back, and closes the generator.
        """
        ...

    @property
    def is_waiting(self) -> bool:
        """Return whether the next batch may take as long as a disk or a store likes."""
        ...

    def give_back(self, held: Sequence[HeldRecord]) -> None:
        """Nobody reads these any more."""
        ...

    def close(self) -> None:
        """Read nothing any more. Idempotent."""
        ...


class LentRecords:
    """The records of the tier in page-locked memory, where they lie.

    The first batches are small: the sooner the first is checked, the sooner the GPU has something to copy.
    """

    def __init__(self, tier: HostMemoryTier) -> None:
        self._tier = tier

    def batches(self, keys: Sequence[BlockKey], size: int) -> Generator[list[HeldRecord], None, None]:
        start, count = 0, 1
        while start < len(keys):
            wanted = keys[start : start + count]
            lent = self._tier.lend(wanted)
            if lent:
                yield lent
            if len(lent) < len(wanted):
                return
            start, count = start + count, min(2 * count, size)

    @property
    def is_waiting(self) -> bool:
        return False

    def give_back(self, held: Sequence[HeldRecord]) -> None:
        self._tier.give_back(slot for slot, _ in held)

    def close(self) -> None:
        """Do nothing: the records are the tier's."""


class ReaderThreads:
    """Threads that read records of one tier.

    They end with the process at the latest: one may hang in a disk that is gone, so this is no ThreadPoolExecutor, for
    whose threads the process would wait.
    """

    def __init__(self, tier: KVStore, count: int) -> None:
        self._tier, self._count = tier, count
        self._wanted: queue.SimpleQueue[tuple[Future[list[int]], BlockKey, memoryview] | None] = queue.SimpleQueue()
        for index in range(count):
            threading.Thread(target=self._run, name=f"kv-{tier.name}-read-{index}", daemon=True).start()

    def read(self, key: BlockKey, into: memoryview) -> Future[list[int]]:
        """Return what KVStore.load will."""
        read: Future[list[int]] = Future()
        self._wanted.put((read, key, into))
        return read

    def close(self) -> None:
        """End the threads once they have read what was asked for."""
        for _ in range(self._count):
            self._wanted.put(None)
        self._count = 0

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            read, key, into = wanted
            if read.set_running_or_notify_cancel():
                try:
                    read.set_result(self._tier.load([key], [into]))
                except Exception as error:
                    read.set_exception(error)


class RecordReader:
    """The records of a tier that is read from: as many reads are under way as there are buffers for.

    `readers` may serve several of these. `buffers`: each has room for a record.
    """

    def __init__(self, readers: ReaderThreads, buffers: Sequence[memoryview]) -> None:
        self._readers, self._buffers = readers, buffers
        self._free = list(range(len(buffers)))
        self._reads: deque[tuple[int, Future[list[int]]]] = deque()

    def batches(self, keys: Sequence[BlockKey], size: int) -> Generator[list[HeldRecord], None, None]:
        waiting, is_missing = deque(keys), False
        try:
            self._read_ahead(waiting)
            while self._reads and not is_missing:
                batch, is_missing = self._take(size)
                if batch:
                    yield batch
                if not is_missing:
                    self._read_ahead(waiting)
        finally:
            self._drop_reads()

    @property
    def is_waiting(self) -> bool:
        return not self._reads or not self._reads[0][1].done()

    def give_back(self, held: Sequence[HeldRecord]) -> None:
        self._free += [buffer for buffer, _ in held]

    def close(self) -> None:
        self._readers.close()

    def _take(self, size: int) -> tuple[list[HeldRecord], bool]:
        """Return records that have been read, and whether the one behind them is not there.

        What a read raised is raised; `_drop_reads` frees the buffer of a read that gave nothing.
        """
        batch: list[HeldRecord] = []
        try:
            while self._reads and len(batch) < size and (not batch or self._reads[0][1].done()):
                buffer, read = self._reads[0]
                sizes = read.result()
                if not sizes:
                    return batch, True
                self._reads.popleft()
                batch.append((buffer, self._buffers[buffer][: sizes[0]]))
        except Exception:
            self.give_back(batch)
            raise
        return batch, False

    def _read_ahead(self, waiting: deque[BlockKey]) -> None:
        while waiting and self._free:
            buffer, key = self._free.pop(), waiting.popleft()
            self._reads.append((buffer, self._readers.read(key, self._buffers[buffer])))

    def _drop_reads(self) -> None:
        """Wait for the reads that nobody wants: their buffers are written to until then."""
        while self._reads:
            buffer, read = self._reads.popleft()
            read.cancel()
            if not read.cancelled():
                read.exception()
            self._free.append(buffer)
