"""The way of new blocks down from a GPU.

Each tier's thread copies what the tier lacks, as fast as it takes that.

Blocks wait in the pool, not in copies of them: one that is overwritten before its turn is not kept.
"""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np

from contracts.kv_store import KVStore
from contracts.layout import KVLayout
from engine.cache.load_plan import NewBlock
from engine.cuda.kv.tier_pages import TierPages
from kv_transfer.chunks.block_record import begin_record, facts_of, seal_record, summed_payload_offset
from kv_transfer.tiers.record_codec import RecordCodec
from worker.core.job_faults import JobFaults
from worker.core.tier_writer import BlockNaming, RecordKeeper, join

MAX_WAITING_BLOCKS = 16384
COPIED_AT_ONCE = 2
"""The blocks that are copied at once: a step's tokens leave the GPU the same way, and wait behind so many at most."""
_log = logging.getLogger(__name__)


def copy_nbytes(record_nbytes: int) -> int:
    """Return the page-locked memory that each tier takes to copy new blocks into, in bytes."""
    return COPIED_AT_ONCE * record_nbytes


class DeviceTierSaver:
    """The thread of one tier, with memory for the blocks of a batch. See DeviceBlockSaver for the rest."""

    def __init__(
        self,
        keeper: RecordKeeper,
        layout: KVLayout,
        pages: TierPages,
        generations: Sequence[int],
        naming: BlockNaming,
    ) -> None:
        self.keeper, self._naming = keeper, naming
        self.counts = Counter(dict.fromkeys(("dropped_blocks", "overwritten_blocks"), 0))
        self._layout, self._pages, self._generations = layout, pages, generations
        self._offset = summed_payload_offset(naming.key_of(bytes(16)), layout)
        nbytes = self._offset + layout.block_nbytes
        memory = pages.pinned(COPIED_AT_ONCE * nbytes)
        self._records = [memory[start : start + nbytes] for start in range(0, len(memory), nbytes)]
        self._payloads = [np.frombuffer(record, np.uint8)[self._offset :] for record in self._records]
        self._lane = pages.lane(COPIED_AT_ONCE)
        self._new: queue.SimpleQueue[NewBlock | None] = queue.SimpleQueue()
        self._num_offered = self._num_done = 0
        self._is_closed = False
        self._faults = JobFaults(f"copying KV from the GPU to the {keeper.tier.name} tier")
        self._thread = threading.Thread(target=self._run, name=f"kv-{keeper.tier.name}-copy-out", daemon=True)
        self._thread.start()

    def offer(self, block: NewBlock) -> None:
        """Queue a block, or drop it; called by the engine's thread alone."""
        if self._num_offered - self._num_done >= MAX_WAITING_BLOCKS:
            self.counts["dropped_blocks"] += 1
            return
        self._num_offered += 1
        self._new.put(block)

    @property
    def is_idle(self) -> bool:
        return self._num_done == self._num_offered

    def close(self) -> None:
        """End the thread; nothing is read from the pool any more."""
        self._is_closed = True
        self._new.put(None)
        join(self._thread)

    def _run(self) -> None:
        has_entered = False
        while (batch := self._next_batch()) is not None:
            try:
                if not has_entered:
                    self._pages.enter()
                    has_entered = True
                self._save([block for block in batch if self._is_wanted(block)])
            except Exception as error:
                self._faults.add(error)
                self.counts["dropped_blocks"] += len(batch)
            self._num_done += len(batch)

    def _next_batch(self) -> list[NewBlock] | None:
        """Wait for a block, and take those that are there behind it; None at the end."""
        batch: list[NewBlock] = []
        while len(batch) < COPIED_AT_ONCE and (not batch or not self._new.empty()):
            block = self._new.get()
            if block is None or self._is_closed:
                return None
            batch.append(block)
        return batch

    def _is_wanted(self, block: NewBlock) -> bool:
        return self._is_there(block) and self.keeper.may_want(self._naming.key(block))

    def _is_there(self, block: NewBlock) -> bool:
        """Return whether the block has not been given to somebody else."""
        is_there = self._generations[block.block] == block.generation
        self.counts["overwritten_blocks"] += not is_there
        return is_there

    def _save(self, blocks: Sequence[NewBlock]) -> None:
        """Copy blocks out of the pool, and keep those that were there all the time."""
        if not blocks:
            return
        self._lane.fetch([block.block for block in blocks], self._payloads[: len(blocks)])
        sums = self._lane.wait()
        are_there = [self._is_there(block) for block in blocks]  # before a tier takes its time
        for index, block in enumerate(blocks):
            if are_there[index] and not self._is_closed:
                self._keep(block, self._records[index], sums[index])

    def _keep(self, block: NewBlock, buffer: memoryview, sums: np.ndarray) -> None:
        """Make a record around a payload, and keep it."""
        key, nbytes = self._naming.key(block), self._layout.block_nbytes
        facts = facts_of(
            key, self._layout, raw_nbytes=nbytes, stored_nbytes=nbytes, plane_sums=sums.astype("<u4").tobytes()
        )
        begin_record(facts, buffer)
        self.keeper.keep(key, seal_record(facts, buffer), self._naming.worth(block), self._naming.lossy_key(block))


class DeviceBlockSaver:
    """The threads that copy new blocks out of a GPU's pool, one for each tier.

    See BlockSaver for what it takes.
    """

    def __init__(
        self,
        tiers: Sequence[KVStore],
        layout: KVLayout,
        pages: TierPages,
        generations: Sequence[int],
        naming: BlockNaming,
        codec: RecordCodec,
    ) -> None:
        self._pages = pages
        facts = layout, pages, generations, naming
        self._savers = [DeviceTierSaver(RecordKeeper(tier, codec), *facts) for tier in tiers]

    def offer(self, block: NewBlock) -> None:
        self._pages.launched(block.is_decoded)
        for saver in self._savers:
            saver.offer(block)

    @property
    def is_idle(self) -> bool:
        """Return whether all that was offered is kept or dropped."""
        return all(saver.is_idle for saver in self._savers)

    def counters(self) -> dict[str, float]:
        """Return what counts up, by metric names without `kv_`."""
        counters: dict[str, float] = {"dropped_blocks": 0.0, "overwritten_blocks": 0.0}
        for saver in self._savers:
            name = saver.keeper.tier.name
            counters["overwritten_blocks"] += saver.counts["overwritten_blocks"]
            counters[f"{name}_dropped_blocks"] = float(saver.counts["dropped_blocks"])
            counters |= {f"{name}_{key}": value for key, value in saver.keeper.counters().items()}
        return counters

    def close(self) -> None:
        for saver in self._savers:
            saver.close()
