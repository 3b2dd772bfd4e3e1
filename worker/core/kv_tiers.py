"""The tiers below the KV cache, joined to the engine.

What is new goes down, prefixes that are missing come up.

Three kinds of threads work beside the engine's. One copies new blocks out of the pool, while their generation says that
they are still there, and makes records of them. One for each tier keeps records. LOADERS read records back, verify
them, and write them to the pages of a sequence that waits. Nothing of this is on a step's path, every queue is bounded,
and a load ends by its deadline: the engine then computes what is missing.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from contracts.errors import Corrupt, LayoutMismatch
from contracts.hashing import block_key
from contracts.ids import RequestId
from contracts.kv_store import BlockKey, BlockWorth, KVStore
from contracts.layout import KVLayout
from engine.cache.load_plan import (
    MAX_WAIT_SHARE,
    LoadPlan,
    NewBlock,
    PrefixLoad,
    TierOffer,
    TierRate,
    compute_seconds,
    plan_load,
)
from kv_transfer.chunks.block_record import RAW, begin_record, facts_of, max_record_nbytes, seal_record, verify

LOADERS = 2
BATCH = 8
"""The blocks that a loader reads at once: so many are lost at most when a load is given up."""
MAX_NEW_BLOCKS = 4096
MAX_QUEUED_NBYTES = 256 << 20
"""Records that wait for one tier, in bytes; what comes when it is full is dropped."""
GUESSED_TOKENS_PER_S = 1000.0
"""The rate of computing prompts until one is measured."""
MIN_LOOKUP_S = 0.02
"""A lookup in a store of several workers may take this long, or a tenth of computing what is missing."""
FIRST_GUESSES = {"host": (4e9, 0.0), "disk": (1e9, 0.001), "store": (2e8, 0.002)}
"""Bytes per second, and seconds before the first, until they are measured."""
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Load:
    """A load under way. `lock` is held while a page is written, and while `is_over` is set."""

    wanted: PrefixLoad
    keys: list[BlockKey]
    deadline_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_done: int = 0
    is_over: bool = False


class _Writer:
    """The queue of records for one tier, and the thread that keeps them."""

    def __init__(self, tier: KVStore) -> None:
        self.tier = tier
        self.num_dropped = 0
        self._queue: queue.SimpleQueue[tuple[BlockKey, bytes, BlockWorth] | None] = queue.SimpleQueue()
        self._nbytes = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"kv-{tier.name}-write", daemon=True)
        self._thread.start()

    def put(self, key: BlockKey, record: memoryview, worth: BlockWorth) -> None:
        """Queue a copy of a record, or drop it."""
        with self._lock:
            if self._nbytes + len(record) > MAX_QUEUED_NBYTES:
                self.num_dropped += 1
                return
            self._nbytes += len(record)
        self._queue.put((key, bytes(record), worth))

    def close(self) -> None:
        """End after what is being kept; what waits is dropped."""
        self._queue.put(None)
        with self._lock:
            self._nbytes = MAX_QUEUED_NBYTES
        self._thread.join()

    @property
    def is_idle(self) -> bool:
        return self._nbytes == 0

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            key, record, worth = item
            if self.tier.is_local or not self.tier.lookup([key]):  # another worker may have sent it
                self.tier.store(key, memoryview(record), worth)
            with self._lock:
                self._nbytes -= len(record)


class KVTiers:
    """The engine's LowerTiers over `tiers`, the fastest first.

    `pages`: the pool, uint8 `[num_planes, num_blocks, page_nbytes]`; `generations`: see BlockPool. `tokens_per_s`
    returns how fast prompts are computed, 0.0 while that is unknown. `ring` wakes the engine's thread.
    """

    def __init__(
        self,
        tiers: Sequence[KVStore],
        layout: KVLayout,
        pages: np.ndarray,
        generations: Sequence[int],
        tokens_per_s: Callable[[], float],
        ring: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tiers = {tier.name: tier for tier in tiers}
        self._layout, self._pages, self._generations = layout, pages, generations
        self._tokens_per_s, self._ring, self._clock = tokens_per_s, ring, clock
        self._record_nbytes = max_record_nbytes(layout)
        self._rates = {tier.name: TierRate(*FIRST_GUESSES[tier.name]) for tier in tiers}
        self._writers = [_Writer(tier) for tier in tiers]
        self._new: queue.Queue[NewBlock | None] = queue.Queue(MAX_NEW_BLOCKS)
        self._wanted: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._loads: dict[RequestId, _Load] = {}
        self._ended: queue.SimpleQueue[_Load] = queue.SimpleQueue()
        self._counts: Counter[str] = Counter()
        self._named: set[str] = set()
        self._is_closed = False
        self._threads = [threading.Thread(target=self._copy_out, name="kv-copy-out", daemon=True)]
        self._threads += [
            threading.Thread(target=self._load_all, name=f"kv-load-{index}", daemon=True) for index in range(LOADERS)
        ]
        for thread in self._threads:
            thread.start()

    # The engine's thread.

    def begin(self, load: PrefixLoad) -> bool:
        """Begin a load if a tier in this machine holds what pays, or a store may; see LowerTiers."""
        keys = [self._key(digest) for digest in load.digests]
        now = self._clock()
        asks_store = any(tier.is_on and not tier.is_local for tier in self.tiers.values())
        plan = self._plan(load, [tier for tier in self.tiers.values() if tier.is_local], keys)
        if not plan.parts and not asks_store:
            self._counts["missed_prompts"] += 1
            return False
        missing_s = self._compute_s(load.first_token, len(keys))
        lookup_s = max(MIN_LOOKUP_S, (MAX_WAIT_SHARE - 1) * missing_s) if asks_store else 0.0
        entry = self._loads[load.request_id] = _Load(load, keys, now + lookup_s + plan.limit_s)
        self._wanted.put(entry)
        return True

    def finished(self) -> list[tuple[RequestId, int]]:
        """Return the loads that have ended, those that ran out of time among them; see LowerTiers."""
        ended: list[tuple[RequestId, int]] = []
        while not self._ended.empty():
            load = self._ended.get()
            request_id = load.wanted.request_id
            if self._loads.get(request_id) is load:  # else it was cancelled, and may have been asked for again
                del self._loads[request_id]
                ended.append((request_id, load.num_done))
        now = self._clock()
        for request_id, load in [item for item in self._loads.items() if item[1].deadline_s < now]:
            self._counts["loads_given_up"] += 1
            self._stop(load)
            del self._loads[request_id]
            ended.append((request_id, load.num_done))
        for _, num_blocks in ended:
            self._counts["loaded_blocks"] += num_blocks
            self._counts["loaded_prompts" if num_blocks else "missed_prompts"] += 1
        return ended

    def cancel(self, request_id: RequestId) -> None:
        """Give a load up; see LowerTiers."""
        if load := self._loads.pop(request_id, None):
            self._stop(load)

    def offer(self, block: NewBlock) -> None:
        """Queue a block to be copied out, or drop it; see LowerTiers."""
        try:
            self._new.put_nowait(block)
        except queue.Full:
            self._counts["dropped_blocks"] += 1

    def counters(self) -> dict[str, float]:
        """Return all that counts up, by metric names: `kv_` for all tiers, `kv_host_` and so on for one."""
        counts = {f"kv_{name}": float(value) for name, value in sorted(self._counts.items())}
        for writer in self._writers:
            counts[f"kv_{writer.tier.name}_dropped_blocks"] = writer.num_dropped
            for name, value in writer.tier.stats().items():
                if name not in _GAUGES:
                    counts[f"kv_{writer.tier.name}_{name}"] = value
        return counts

    def gauges(self) -> dict[str, float]:
        """Return what each tier holds now, and the rate at which it gives blocks."""
        gauges: dict[str, float] = {"kv_loads": len(self._loads)}
        for name, tier in self.tiers.items():
            gauges |= {f"kv_{name}_{key}": value for key, value in tier.stats().items() if key in _GAUGES}
            gauges[f"kv_{name}_bytes_per_second"] = self._rates[name].nbytes_per_s
        return gauges

    @property
    def is_idle(self) -> bool:
        """Return whether all that was offered is kept or dropped, and nothing is being loaded."""
        return self._new.unfinished_tasks == 0 and not self._loads and all(writer.is_idle for writer in self._writers)

    def close(self) -> None:
        """End the threads; nothing is read from the pool or written to it any more."""
        self._is_closed = True
        for load in self._loads.values():
            self._stop(load)
        self._new.put(None)
        for _ in range(LOADERS):
            self._wanted.put(None)
        for thread in self._threads:
            thread.join()
        for writer in self._writers:
            writer.close()
            writer.tier.close()

    def _stop(self, load: _Load) -> None:
        with load.lock:
            load.is_over = True

    # The decision.

    def _key(self, digest: bytes) -> BlockKey:
        return BlockKey(block_key(self._layout.shared_id, digest))

    def _compute_s(self, first_token: int, num_blocks: int) -> float:
        rate = self._tokens_per_s() or GUESSED_TOKENS_PER_S
        return compute_seconds(first_token, num_blocks * self._layout.block_size, rate)

    def _plan(self, load: PrefixLoad, tiers: Sequence[KVStore], keys: Sequence[BlockKey]) -> LoadPlan:
        offers = []
        for tier in tiers:
            rate = self._rates[tier.name]
            held = tier.lookup(keys) if tier.is_on else 0
            offers.append(TierOffer(tier.name, held, rate.latency_s, self._record_nbytes / rate.nbytes_per_s))
        rate = self._tokens_per_s() or GUESSED_TOKENS_PER_S
        plan = plan_load(offers, load.first_token, self._layout.block_size, rate)
        used = {part.tier for part in plan.parts}
        for offer in offers:
            if offer.num_held and offer.name not in used:
                self._rates[offer.name].passed_over()
        return plan

    # Down.

    def _copy_out(self) -> None:
        buffer = memoryview(bytearray(self._record_nbytes))
        while (block := self._new.get()) is not None:
            if not self._is_closed:
                self._keep(block, buffer)
            self._new.task_done()

    def _keep(self, block: NewBlock, buffer: memoryview) -> None:
        """Copy a block out of the pool for the tiers that do not have it, unless it is being overwritten."""
        key = self._key(block.digest)
        writers = [w for w in self._writers if w.tier.is_on and not (w.tier.is_local and w.tier.lookup([key]))]
        if not writers:
            return
        nbytes = self._layout.block_nbytes
        facts = facts_of(key, self._layout, raw_nbytes=nbytes, stored_nbytes=nbytes)
        payload = begin_record(facts, buffer).reshape(self._pages.shape[0], self._pages.shape[2])
        payload[:] = self._pages[:, block.block]
        if self._generations[block.block] != block.generation:
            self._counts["overwritten_blocks"] += 1  # before or while it was copied
            return
        record = seal_record(facts, buffer)
        parent = None if block.parent is None else self._key(block.parent)
        worth = BlockWorth(compute_s=self._compute_s(block.first_token, 1), parent=parent)
        for writer in writers:
            writer.put(key, record, worth)

    # Up.

    def _load_all(self) -> None:
        into = [memoryview(bytearray(self._record_nbytes)) for _ in range(BATCH)]
        for tier in self.tiers.values():
            if not tier.is_local:
                tier.lookup(
                    [BlockKey(bytes(16))]
                )  # connects: the first prompt's deadline is shorter than that may take
        while (load := self._wanted.get()) is not None:
            if not load.is_over:
                self._load(load, into)
            self._ended.put(load)
            self._ring()

    def _load(self, load: _Load, into: Sequence[memoryview]) -> None:
        """Load what pays, now that stores of several workers can be asked too."""
        start = self._clock()
        plan = self._plan(load.wanted, list(self.tiers.values()), load.keys)
        load.deadline_s = max(load.deadline_s, start + plan.limit_s)
        for part in plan.parts:
            for first in range(part.first, part.last, BATCH):
                last = min(first + BATCH, part.last)
                if load.is_over or not self._load_batch(load, self.tiers[part.tier], first, last, into):
                    return

    def _load_batch(self, load: _Load, tier: KVStore, first: int, last: int, into: Sequence[memoryview]) -> bool:
        """Load blocks `[first, last)`; returns whether all of them are in their pages."""
        keys, start = load.keys[first:last], time.perf_counter()
        sizes = tier.load(keys, into[: len(keys)])
        for index, nbytes in enumerate(sizes):
            payload = self._verified(tier, into[index][:nbytes], keys[index])
            if payload is None:
                return False
            with load.lock:
                if load.is_over:
                    return False
                block = load.wanted.blocks[first + index]
                self._pages[:, block] = payload.reshape(self._pages.shape[0], self._pages.shape[2])
                load.num_done = first + index + 1
        self._rates[tier.name].add(sum(sizes), time.perf_counter() - start)
        return len(sizes) == len(keys)

    def _verified(self, tier: KVStore, record: memoryview, key: BlockKey) -> np.ndarray | None:
        """Return the bytes of a block, or None for a record that is not to be believed, which is evicted."""
        try:
            block = verify(record, key, self._layout)
            if block.facts.codec == RAW:
                return block.payload
            reason = f"codec is {block.facts.codec!r}, which this worker does not read"
        except (Corrupt, LayoutMismatch) as error:
            reason = str(error)
        field_name = reason.split(" ", 1)[0]
        self._counts[f"{tier.name}_refused_blocks"] += 1
        if f"{tier.name} {field_name}" not in self._named:
            self._named.add(f"{tier.name} {field_name}")
            _log.warning("KV from the %s tier is refused and forgotten: %s", tier.name, reason)
        tier.evict([key])
        return None


_GAUGES = {"blocks", "bytes", "on", "writable", "foreign_blocks"}
