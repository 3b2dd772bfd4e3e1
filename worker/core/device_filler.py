"""The blocks of a load into the pages of a GPU.

Records lie in page-locked memory; the GPU copies them into their pages and sums these up, a batch at a time on one of
several lanes, while the next records are read. What a block's pages are is compared with what its record says they
should be, and only then does the block count.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from contracts.errors import TransferError
from contracts.kv_store import BlockKey
from engine.cache.load_plan import MAX_BATCH, TierRate
from engine.cuda.kv.tier_pages import PageLane, TierPages
from kv_transfer.chunks.block_record import max_record_nbytes
from worker.core.block_load import BlockLoad
from worker.core.record_check import DIFFERS, RecordCheck
from worker.core.record_sources import HeldRecord, RecordSource

NUM_LANES = 3
"""The batches whose copies are under way at once: one is copied, one waits behind it, one is made ready."""
DEVICE_ERRORS = (TransferError, RuntimeError)
"""What CUDA's calls here raise, and torch's."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Landing:
    """Blocks from `first` on, of these `keys`, on their way into pages, whose checksums should be `sums`.

    `payloads` and `held` are kept until they are there.
    """

    lane: PageLane
    first: int
    keys: Sequence[BlockKey]
    sums: list[np.ndarray]
    payloads: list[np.ndarray]
    held: list[HeldRecord]


class DeviceFiller:
    """One thread's lanes, and the source of its records."""

    def __init__(self, check: RecordCheck, rate: TierRate, pages: TierPages, source: RecordSource) -> None:
        self._check, self._rate, self._pages, self._source = check, rate, pages, source
        self._record_nbytes = max_record_nbytes(check.layout)
        self._lanes = deque(pages.lane(MAX_BATCH) for _ in range(NUM_LANES))
        self._has_entered = False

    def fill(self, load: BlockLoad, keys: Sequence[BlockKey]) -> None:
        """Fill the next blocks, of these keys, as far as they are here, right, and in time."""
        if not self._has_entered:
            self._pages.enter()
            self._has_entered = True
        size = load.budget.blocks_per_batch(self._record_nbytes / self._rate.nbytes_per_s)
        landings: deque[Landing] = deque()
        self._began_s = time.perf_counter()
        with closing(self._source.batches(keys, size)) as batches:
            try:
                self._launch_all(load, keys, batches, landings)
            except DEVICE_ERRORS as error:
                _log.error("KV from the %s tier can't be copied to the GPU: %s", self._check.tier.name, error)
            finally:
                while landings:
                    self._land(load, landings.popleft())

    def close(self) -> None:
        """Load nothing any more. Idempotent."""
        self._source.close()

    def _launch_all(
        self,
        load: BlockLoad,
        keys: Sequence[BlockKey],
        batches: Iterator[list[HeldRecord]],
        landings: deque[Landing],
    ) -> None:
        """Launch batch after batch, until all are, one is not right, or the load is over."""
        first = load.num_done
        for held in batches:
            landing = self._launched(load, first, keys[: len(held)], held)
            if landing is None:
                return
            landings.append(landing)
            first, keys = first + len(held), keys[len(held) :]
            is_right = len(landing.sums) == len(held)
            # Nothing is on its way while a read hangs: a load that is given up would wait for it.
            while landings and (len(landings) == NUM_LANES or not is_right or self._source.is_waiting):
                is_right = self._land(load, landings.popleft()) and is_right
            if not is_right:
                return

    def _launched(
        self, load: BlockLoad, first: int, keys: Sequence[BlockKey], held: list[HeldRecord]
    ) -> Landing | None:
        """Launch the copies of records that are right so far; None if there is none, or the load is over."""
        payloads: list[np.ndarray] = []
        sums: list[np.ndarray] = []
        has_begun = False
        try:
            for index, (key, (_, record)) in enumerate(zip(keys, held, strict=True), first):
                stated = self._check.stated_kv_of(record, key, load.loss_of(index, key))
                if stated is None:
                    break
                payloads.append(stated[0])
                sums.append(stated[1])
            has_begun = bool(sums) and load.begin_writing()
        finally:
            if not has_begun:
                self._source.give_back(held)
        if not has_begun:
            return None
        landing = Landing(self._lanes.popleft(), first, keys[: len(sums)], sums, payloads, held)
        try:
            landing.lane.fill(payloads, load.wanted.blocks[first : first + len(sums)])
        except BaseException:
            self._finish(load, landing, 0)
            raise
        return landing

    def _land(self, load: BlockLoad, landing: Landing) -> bool:
        """Wait for copies, and count the blocks that are right; returns whether all are, and those before."""
        num_right, found = 0, None
        try:
            found = landing.lane.wait()
            num_right = _num_equal(found, landing.sums)
        except Exception as error:  # whatever it is: what waits behind this landing has to be given back, too
            _log.error("KV from the %s tier can't be copied to the GPU: %s", self._check.tier.name, error)
        is_next = load.num_done == landing.first
        self._finish(load, landing, num_right)
        now = time.perf_counter()
        self._rate.add(num_right * self._record_nbytes, now - self._began_s)
        self._began_s = now
        if found is not None and num_right < len(landing.sums):
            self._check.refuse(landing.keys[num_right], DIFFERS)
        self._check.counts["loaded_blocks"] += num_right if is_next else 0
        return is_next and num_right == len(landing.sums)

    def _finish(self, load: BlockLoad, landing: Landing, num_right: int) -> None:
        """Count what is right of a landing, and give back what it held."""
        load.end_writing(landing.first, landing.keys[:num_right])
        self._source.give_back(landing.held)
        self._lanes.append(landing.lane)


def _num_equal(found: np.ndarray, expected: Sequence[np.ndarray]) -> int:
    """Return how many of the first blocks have the checksums that they should."""
    is_equal = (found == np.stack(expected)).all(axis=1)
    return len(expected) if is_equal.all() else int(np.argmin(is_equal))
