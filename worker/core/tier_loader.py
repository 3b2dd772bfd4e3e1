"""The way of blocks up: one tier's own threads read its records, verify them, and fill pages."""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from contracts.errors import Corrupt, LayoutMismatch
from contracts.kv_loss import EXACT
from contracts.kv_store import BlockKey, KVStore
from contracts.layout import KVLayout
from contracts.node import TierSpeed
from engine.cache.load_plan import MAX_BATCH, LoadBudget, PrefixLoad, TierOffer, TierRate, plan_load
from kv_transfer.chunks.block_record import max_record_nbytes, verify
from kv_transfer.tiers.record_codec import RecordCodec
from worker.core.tier_writer import join

NUM_THREADS = 2
"""The loads that one tier serves at once."""
MAX_LOOKUPS = 3
"""How often a tier is asked for exact blocks and then for others, where the two alternate in a prompt."""
PROBE_PERIOD_S = 1.0
"""How often a store that is off may be asked whether it is back."""
FIRST_GUESSES = {"host": (4e9, 0.0), "disk": (1e9, 0.001), "store": (2e8, 0.002)}
"""Bytes per second, and seconds before the first, until they are measured."""
_PROBE = BlockKey(bytes(16))
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class BlockLoad:
    """A load under way. `lock` is held while a page is written, and while `is_over` is set.

    `keys` are of the exact blocks, `lossy_keys` of those with the loss that the prompt takes, if it takes any.
    `asked`: the tiers that were asked, in order; the last has it now. `first_lossy`: of the blocks that are done.
    """

    wanted: PrefixLoad
    keys: list[BlockKey]
    lossy_keys: list[BlockKey]
    budget: LoadBudget
    start_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked: list[str] = field(default_factory=list)
    num_done: int = 0
    first_lossy: int | None = None
    is_over: bool = False

    @property
    def deadline_s(self) -> float:
        """Return when it is given up, unless it has come further by then."""
        return self.start_s + self.budget.limit_s(self.num_done)

    @property
    def next_token(self) -> int:
        return self.wanted.first_token + self.num_done * self.budget.block_size

    @property
    def num_exact(self) -> int:
        """Return how many of the blocks that are done come before the first that has lost something."""
        return self.num_done if self.first_lossy is None else self.first_lossy

    def held_by(self, tier: KVStore) -> list[BlockKey]:
        """Return the keys of the missing blocks that a tier holds, from the first without a gap.

        Exact ones come before those that have lost something.
        """
        held: list[BlockKey] = []
        for turn, keys in enumerate((self.keys, self.lossy_keys) * MAX_LOOKUPS):
            missing = keys[self.num_done + len(held) :]
            num_held = tier.lookup(missing) if missing else 0
            if turn and not num_held:
                break
            held += missing[:num_held]
        return held

    def stop(self) -> None:
        """Let nothing be written to its pages once this returns."""
        with self.lock:
            self.is_over = True


class TierLoader:
    """The threads that serve loads from one tier, and what they learn about its speed.

    A tier has its own threads, so that one that hangs keeps no other waiting. `pass_on` gets each load that the tier
    has done what it can for.
    """

    def __init__(
        self,
        tier: KVStore,
        layout: KVLayout,
        pages: np.ndarray,
        pass_on: Callable[[BlockLoad], None],
        clock: Callable[[], float],
        codec: RecordCodec,
    ) -> None:
        self._codec = codec
        self.tier, self.rate = tier, TierRate(*FIRST_GUESSES[tier.name])
        self._layout, self._pages, self._pass_on, self._clock = layout, pages, pass_on, clock
        self._record_nbytes = max_record_nbytes(layout)
        self._queue: queue.SimpleQueue[tuple[BlockLoad, int] | None] = queue.SimpleQueue()
        self._current: dict[int, BlockLoad] = {}
        self._counts = Counter(dict.fromkeys(("given_up_loads", "loaded_blocks", "refused_blocks"), 0))
        self._named: set[str] = set()
        self._is_late = False
        self._threads = [
            threading.Thread(target=self._run, args=[index], name=f"kv-{tier.name}-load-{index}", daemon=True)
            for index in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def can_load(self) -> bool:
        """Return whether the tier is on, and not all its threads hang in loads that were given up."""
        current = list(self._current.values())
        return self.tier.is_on and not (len(current) == NUM_THREADS and all(load.is_over for load in current))

    @property
    def speed(self) -> TierSpeed:
        """Return how fast it gives KV, by what was measured."""
        tokens_per_s = self.rate.nbytes_per_s * self._layout.block_size / self._record_nbytes
        return TierSpeed(self.tier.name, tokens_per_s, self.rate.latency_s)

    def offer(self, num_held: int) -> TierOffer:
        """Return what a plan needs to know of a tier that holds so many blocks."""
        return TierOffer(self.tier.name, num_held, self.rate.latency_s, self._record_nbytes / self.rate.nbytes_per_s)

    def may_pay(self, load: BlockLoad) -> bool:
        """Return whether to ask a tier that takes a while to say what it holds."""
        if not self.can_load:
            return False
        may_pay = self._clock() + self.rate.latency_s < load.deadline_s
        if not may_pay:
            self.rate.passed_over()
        return may_pay

    def put(self, load: BlockLoad, last: int) -> None:
        """Queue a load, of the blocks before `last`; a tier that is not local finds out itself what it holds."""
        load.asked.append(self.tier.name)
        self._queue.put((load, last))

    def gave_up(self, load: BlockLoad) -> None:
        """Count a load that fell behind computing here."""
        self._counts["given_up_loads"] += 1
        if not self._is_late:
            self._is_late = True
            _log.warning(
                "KV from the %s tier comes slower than computing it: request %s has %d of %d blocks after %.3f s, and "
                "computes the others; this is told again once the tier was fast",
                self.tier.name, load.wanted.request_id, load.num_done, len(load.keys), self._clock() - load.start_s,
            )  # fmt: skip

    def counters(self) -> dict[str, float]:
        """Return what counts up, by metric names without a prefix."""
        return {name: float(value) for name, value in sorted(self._counts.items())}

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            join(thread)

    # The threads.

    def _run(self, index: int) -> None:
        into: list[memoryview] = []
        if not self.tier.is_local:
            self.tier.lookup([_PROBE])  # connects, which takes longer than the first prompt may wait
        while (item := self._next()) is not None:
            load, last = item
            self._current[index] = load
            if not load.is_over:
                into = into or [memoryview(bytearray(self._record_nbytes)) for _ in range(MAX_BATCH)]
                num_before = load.num_done
                self._load(load, last, into)
                self._is_late = self._is_late and (load.is_over or load.num_done == num_before)
            del self._current[index]
            self._pass_on(load)

    def _next(self) -> tuple[BlockLoad, int] | None:
        """Wait for a load; a tier that is off is asked meanwhile, for nobody else asks it then."""
        while True:
            try:
                return self._queue.get(timeout=PROBE_PERIOD_S)
            except queue.Empty:
                if not self.tier.is_on:
                    self.tier.lookup([_PROBE])

    def _load(self, load: BlockLoad, last: int, into: Sequence[memoryview]) -> None:
        """Load the blocks before `last`, as far as they are here, right, and in time."""
        keys = load.held_by(self.tier)[: last - load.num_done] if self.tier.is_local else self._find(load)
        size = load.budget.blocks_per_batch(self._record_nbytes / self.rate.nbytes_per_s)
        for start in range(0, len(keys), size):
            if load.is_over or not self._load_batch(load, keys[start : start + size], into):
                return

    def _find(self, load: BlockLoad) -> list[BlockKey]:
        """Return the keys of what to load from a tier that has to be asked."""
        start_s = time.perf_counter()
        held = load.held_by(self.tier)
        self.rate.add_lookup(time.perf_counter() - start_s)
        before = load.next_token // load.budget.block_size
        for index, key in enumerate(held, 1):
            self.tier.held.add(key, before + index)
        budget = load.budget
        plan = plan_load([self.offer(len(held))], load.next_token, budget.block_size, budget.tokens_per_s)
        if held and not plan.parts:
            self.rate.passed_over()
        return held[: plan.num_blocks]

    def _load_batch(self, load: BlockLoad, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> bool:
        """Load the next blocks, of these keys; returns whether all of them are in their pages."""
        first, start_s = load.num_done, time.perf_counter()
        sizes = self.tier.load(keys, into[: len(keys)])
        is_whole = all(
            self._fill(load, first + index, keys[index], into[index][:nbytes]) for index, nbytes in enumerate(sizes)
        )
        # In bytes of KV, and with the decoding, since plans ask how soon a block is in its pages.
        self.rate.add(len(sizes) * self._record_nbytes, time.perf_counter() - start_s)
        return is_whole and len(sizes) == len(keys)

    def _fill(self, load: BlockLoad, index: int, key: BlockKey, record: memoryview) -> bool:
        """Put a block into its page; returns False if it is not right, or no longer wanted."""
        is_exact = key == load.keys[index]
        payload = self._verified(record, key, EXACT if is_exact else load.wanted.loss)
        if payload is None:
            return False
        with load.lock:
            if load.is_over:
                return False
            self._pages[:, load.wanted.blocks[index]] = payload.reshape(self._pages.shape[0], self._pages.shape[2])
            load.num_done = index + 1
            if not is_exact and load.first_lossy is None:
                load.first_lossy = index
        self._counts["loaded_blocks"] += 1
        return True

    def _verified(self, record: memoryview, key: BlockKey, loss: str) -> np.ndarray | None:
        """Return the KV of a block, or None for a record that is not to be believed, which is evicted."""
        try:
            return self._codec.read(verify(record, key, self._layout), loss)
        except (Corrupt, LayoutMismatch) as error:
            self._refuse(str(error))
        self.tier.evict([key])
        return None

    def _refuse(self, reason: str) -> None:
        field_name = reason.split(" ", 1)[0]
        self._counts["refused_blocks"] += 1
        if field_name not in self._named:
            self._named.add(field_name)
            _log.warning("KV from the %s tier is refused and forgotten: %s", self.tier.name, reason)
