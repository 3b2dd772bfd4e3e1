"""The way of new blocks down: out of the pool, into records, to each tier by a thread of its own."""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.hashing import inexact_digest
from contracts.kv_store import BlockKey, BlockWorth, KVStore
from contracts.layout import KVLayout
from engine.cache.load_plan import NewBlock
from kv_transfer.chunks.block_record import begin_record, facts_of, max_record_nbytes, seal_record
from kv_transfer.codecs.level import loss_of
from kv_transfer.tiers.record_codec import RecordCodec, WriteRate
from worker.core.host_pages import HostPages
from worker.core.job_faults import JobFaults

MAX_NEW_BLOCKS = 4096
MAX_QUEUED_NBYTES = 256 << 20
"""Records that wait for one tier, in bytes; what comes when it is full is dropped."""
CLOSE_TIMEOUT_S = 5.0
"""How long the end of a worker waits for a tier that does not answer."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueuedRecord:
    """A record for a tier.

    `lossy_key`: of the block once it has lost something; None if it may lose nothing.
    """

    key: BlockKey
    record: bytes
    worth: BlockWorth
    lossy_key: BlockKey | None


@dataclass(frozen=True)
class BlockNaming:
    """What tiers are told of a block beside its bytes.

    `key_of` and `compute_s` return the key of a digest, and the seconds that the block at a token takes. `loss`: what
    this worker's KV may lose on its way to slow tiers, see RecordCodec.
    """

    block_size: int
    key_of: Callable[[bytes], BlockKey]
    compute_s: Callable[[int], float]
    loss: str

    def key(self, block: NewBlock) -> BlockKey:
        return self.key_of(block.digest)

    def worth(self, block: NewBlock) -> BlockWorth:
        parent = None if block.parent is None else self.key_of(block.parent)
        num_blocks = block.first_token // self.block_size + 1
        return BlockWorth(compute_s=self.compute_s(block.first_token), parent=parent, num_blocks=num_blocks)

    def lossy_key(self, block: NewBlock) -> BlockKey | None:
        """Return the key of a block once it has suffered the loss that its worker takes.

        None if it may lose nothing: the first block of a prompt keeps every bit, and what has lost something loses no
        more.
        """
        may_lose = self.loss and block.parent is not None and not block.loss
        return self.key_of(inexact_digest(block.digest, self.loss)) if may_lose else None


class RecordKeeper:
    """One tier and its records.

    They are compressed if the tier takes bytes so slowly that it pays; memory never does.
    """

    def __init__(self, tier: KVStore, codec: RecordCodec) -> None:
        self.tier = tier
        self._codec, self._rate = codec, WriteRate()
        self._compressed = Counter(dict.fromkeys(("compressed_blocks", "compressed_raw_bytes", "compressed_bytes"), 0))
        self._levels: set[str] = set()

    def may_want(self, key: BlockKey) -> bool:
        """Return whether it is on and lacks a record; one that takes a while to say so may."""
        return self.tier.is_on and not (self.tier.is_local and self.tier.lookup([key]))

    def keep(self, key: BlockKey, record: memoryview, worth: BlockWorth, lossy_key: BlockKey | None) -> None:
        """Keep a record, unless another worker has sent it. `lossy_key`: see QueuedRecord."""
        if not self.tier.is_local and self.tier.lookup([key]):
            self.tier.held.add(key, worth.num_blocks)
            return
        level = ""
        if self.tier.name != "host":
            level = self._codec.choose(record, self._rate.nbytes_per_s, lossy_key is not None)
        if level:
            small_key = lossy_key if loss_of(level) and lossy_key is not None else key
            if small_key != key and self.tier.lookup([small_key]):
                return
            small = self._codec.compress(record, key, level, small_key)
            if small is not None:
                self._count_compressed(level, len(record), len(small))
                key, record = small_key, small
        start_s = time.perf_counter()
        if self.tier.store(key, record, worth):
            self._rate.add(len(record), time.perf_counter() - start_s)

    def counters(self) -> dict[str, float]:
        """Return what counts up, by metric names without a prefix."""
        return {name: float(n) for name, n in self._compressed.items()}

    def _count_compressed(self, level: str, nbytes: int, small_nbytes: int) -> None:
        self._compressed["compressed_blocks"] += 1
        self._compressed["compressed_raw_bytes"] += nbytes
        self._compressed["compressed_bytes"] += small_nbytes
        if level not in self._levels:
            self._levels.add(level)
            name, rate = self.tier.name, 8 * self._rate.nbytes_per_s / 1e6
            _log.info("KV for the %s tier is compressed, level %s: it takes %.0f Mbit/s", name, level, rate)


class TierWriter:
    """The queue of records for one tier, and the thread that keeps them."""

    def __init__(self, tier: KVStore, codec: RecordCodec) -> None:
        self.keeper = RecordKeeper(tier, codec)
        self.num_dropped = 0
        self._faults = JobFaults(f"writing KV to the {tier.name} tier")
        self._queue: queue.SimpleQueue[QueuedRecord | None] = queue.SimpleQueue()
        self._nbytes = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"kv-{tier.name}-write", daemon=True)
        self._thread.start()

    def put(self, queued: QueuedRecord) -> None:
        """Queue a record, or drop it."""
        with self._lock:
            if self._nbytes + len(queued.record) > MAX_QUEUED_NBYTES:
                self.num_dropped += 1
                return
            self._nbytes += len(queued.record)
        self._queue.put(queued)

    def close(self) -> None:
        """End after what is being kept, or without it after CLOSE_TIMEOUT_S; what waits is dropped."""
        self._queue.put(None)
        with self._lock:
            self._nbytes = MAX_QUEUED_NBYTES
        join(self._thread)

    @property
    def is_idle(self) -> bool:
        return self._nbytes == 0

    def counters(self) -> dict[str, float]:
        """Return what counts up, by metric names without a prefix."""
        return {"dropped_blocks": float(self.num_dropped)} | self.keeper.counters()

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            num_failed = 0
            try:
                self.keeper.keep(queued.key, memoryview(queued.record), queued.worth, queued.lossy_key)
            except Exception as error:  # Corrupt, for one, if a bit of it flipped while it waited
                self._faults.add(error)
                num_failed = 1
            with self._lock:
                self.num_dropped += num_failed
                self._nbytes -= len(queued.record)


class BlockSaver:
    """The thread that copies new blocks out of the pool.

    A copy counts if the block's generation says afterwards that it was there all the time. `pages` and `generations`:
    see KVTiers.
    """

    def __init__(
        self,
        tiers: Sequence[KVStore],
        layout: KVLayout,
        pages: HostPages,
        generations: Sequence[int],
        naming: BlockNaming,
        codec: RecordCodec,
    ) -> None:
        self._layout, self._pages, self._generations, self._naming = layout, pages, generations, naming
        self._counts = Counter(dict.fromkeys(("dropped_blocks", "overwritten_blocks"), 0))
        self._writers = [TierWriter(tier, codec) for tier in tiers]
        self._faults = JobFaults("copying KV for the tiers")
        self._new: queue.Queue[NewBlock | None] = queue.Queue(MAX_NEW_BLOCKS)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-copy-out", daemon=True)
        self._thread.start()

    def offer(self, block: NewBlock) -> None:
        """Queue a block to be copied out, or drop it."""
        try:
            self._new.put_nowait(block)
        except queue.Full:
            self._counts["dropped_blocks"] += 1

    @property
    def is_idle(self) -> bool:
        """Return whether all that was offered is kept or dropped."""
        return self._new.unfinished_tasks == 0 and all(writer.is_idle for writer in self._writers)

    def counters(self) -> dict[str, float]:
        """Return what counts up, by metric names without `kv_`."""
        own = {f"{w.keeper.tier.name}_{name}": value for w in self._writers for name, value in w.counters().items()}
        return own | {name: float(value) for name, value in sorted(self._counts.items())}

    def close(self) -> None:
        """End the threads; nothing is read from the pool any more."""
        self._is_closed = True
        self._new.put(None)
        join(self._thread)
        for writer in self._writers:
            writer.close()

    def _run(self) -> None:
        buffer = memoryview(bytearray(max_record_nbytes(self._layout)))
        while (block := self._new.get()) is not None:
            try:
                if not self._is_closed:
                    self._save(block, buffer)
            except Exception as error:
                self._faults.add(error)
                self._counts["dropped_blocks"] += 1
            self._new.task_done()

    def _save(self, block: NewBlock, buffer: memoryview) -> None:
        """Copy a block out of the pool for the tiers that do not have it, unless it is being overwritten."""
        key = self._naming.key(block)
        writers = [writer for writer in self._writers if writer.keeper.may_want(key)]
        if not writers:
            return
        nbytes = self._layout.block_nbytes
        facts = facts_of(key, self._layout, raw_nbytes=nbytes, stored_nbytes=nbytes)
        self._pages.read(block.block, begin_record(facts, buffer))
        if self._generations[block.block] != block.generation:
            self._counts["overwritten_blocks"] += 1  # before or while it was copied
            return
        record = seal_record(facts, buffer)
        queued = QueuedRecord(key, bytes(record), self._naming.worth(block), self._naming.lossy_key(block))
        for writer in writers:
            writer.put(queued)


def join(thread: threading.Thread) -> None:
    """Wait for a thread's end, at most CLOSE_TIMEOUT_S: one that waits for a dead disk may have none."""
    thread.join(CLOSE_TIMEOUT_S)
    if thread.is_alive():
        _log.warning("%s does not end: its tier does not answer; it ends with the process", thread.name)
