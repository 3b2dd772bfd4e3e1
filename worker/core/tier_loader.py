"""The way of blocks up: one tier's own threads read its records, verify them, and fill pages."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from contracts.kv_store import BlockKey
from contracts.node import TierSpeed
from engine.cache.load_plan import TierOffer, TierRate
from kv_transfer.chunks.block_record import max_record_nbytes
from worker.core.block_load import BlockLoad, LoadPurpose
from worker.core.job_faults import JobFaults
from worker.core.record_check import RecordCheck
from worker.core.tier_writer import join

NUM_THREADS = 2
"""The loads that one tier serves at once."""
PROBE_PERIOD_S = 1.0
"""How often a store that is off may be asked whether it is back."""
_PROBE = BlockKey(bytes(16))
_log = logging.getLogger(__name__)


class BlockFiller(Protocol):
    """The way of one thread from a tier's records into the pool's pages."""

    def fill(self, load: BlockLoad, keys: Sequence[BlockKey]) -> None:
        """Fill the next blocks, of these keys, as far as they are here, right, and in time.

        The load's `num_done` says how far.
        """
        ...

    def close(self) -> None:
        """End what it has of its own."""
        ...


class TierLoader:
    """The threads that serve loads from one tier, and what they learn about its speed.

    A tier has its own threads, so that one that hangs keeps no other waiting. `fillers`: one for each. `pass_on` gets
    each load that the tier has done what it can for.
    """

    def __init__(
        self,
        check: RecordCheck,
        rate: TierRate,
        fillers: Sequence[BlockFiller],
        pass_on: Callable[[BlockLoad], None],
        clock: Callable[[], float],
    ) -> None:
        self.tier, self.rate = check.tier, rate
        self._check, self._fillers, self._pass_on, self._clock = check, fillers, pass_on, clock
        self._record_nbytes = max_record_nbytes(check.layout)
        self._queue: queue.SimpleQueue[tuple[BlockLoad, int] | None] = queue.SimpleQueue()
        self._current: dict[int, BlockLoad] = {}
        self._num_given_up = 0
        self._faults = JobFaults(f"loading KV from the {self.tier.name} tier")
        self._is_late = False
        self._threads = [
            threading.Thread(target=self._run, args=[index], name=f"kv-{self.tier.name}-load-{index}", daemon=True)
            for index in range(len(fillers))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def can_load(self) -> bool:
        """Return whether the tier is on, and not all its threads hang in loads that were given up."""
        current = list(self._current.values())
        return self.tier.is_on and not (len(current) == len(self._threads) and all(load.is_over for load in current))

    @property
    def speed(self) -> TierSpeed:
        """Return how fast it gives KV, by what was measured."""
        tokens_per_s = self.rate.nbytes_per_s * self._check.layout.block_size / self._record_nbytes
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
        """Count a load that fell behind here: behind computing, or behind the link of a handoff."""
        self._num_given_up += 1
        if not self._is_late:
            self._is_late = True
            is_sent = load.purpose is LoadPurpose.HANDOFF
            rival, then = ("being sent", "is sent") if is_sent else ("computing it", "computes")
            _log.warning(
                "KV from the %s tier comes slower than %s: request %s has %d of %d blocks after %.3f s, and "
                "%s the others; this is told again once the tier was fast",
                self.tier.name, rival, load.wanted.request_id, load.num_done, len(load.keys),
                self._clock() - load.start_s, then,
            )  # fmt: skip

    def counters(self) -> dict[str, float]:
        """Return what counts up, by metric names without a prefix."""
        counts = {"given_up_loads": float(self._num_given_up), "failed_loads": float(self._faults.num_failed)}
        return counts | {name: float(value) for name, value in sorted(self._check.counts.items())}

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            join(thread)
        for filler in self._fillers:
            filler.close()

    # The threads.

    def _run(self, index: int) -> None:
        if not self.tier.is_local:
            self._probe()  # connects, which takes longer than the first prompt may wait
        while (item := self._next()) is not None:
            try:
                self._serve(index, *item)
            except Exception as error:
                self._faults.add(error)

    def _serve(self, index: int, load: BlockLoad, last: int) -> None:
        """Fill what the tier has of a load, and pass it on even if that fails: its end is waited for."""
        self._current[index] = load
        try:
            if not load.is_over:
                num_before = load.num_done
                held = load.held_by(self.tier)[: last - num_before] if self.tier.is_local else self._find(load)
                self._fillers[index].fill(load, held)
                self._is_late = self._is_late and (load.is_over or load.num_done == num_before)
        finally:
            del self._current[index]
            self._pass_on(load)

    def _next(self) -> tuple[BlockLoad, int] | None:
        """Wait for a load; a tier that is off is asked meanwhile, for nobody else asks it then."""
        while True:
            try:
                return self._queue.get(timeout=PROBE_PERIOD_S)
            except queue.Empty:
                if not self.tier.is_on:
                    self._probe()

    def _probe(self) -> None:
        """Ask the tier for what nobody has, so that it finds out whether it is there."""
        try:
            self.tier.lookup([_PROBE])
        except Exception as error:
            self._faults.add(error)

    def _find(self, load: BlockLoad) -> list[BlockKey]:
        """Return the keys of what to load from a tier that has to be asked."""
        start_s = time.perf_counter()
        held = load.held_by(self.tier)
        self.rate.add_lookup(time.perf_counter() - start_s)
        before = load.next_token // load.budget.block_size
        for index, key in enumerate(held, 1):
            self.tier.held.add(key, before + index)
        plan = load.budget.plan([self.offer(len(held))], load.next_token)
        if held and not plan.parts:
            self.rate.passed_over()
        return held[: plan.num_blocks]
