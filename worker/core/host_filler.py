"""The blocks of a load into the pages of a pool in the host's memory."""

import time
from collections.abc import Sequence

from contracts.kv_store import BlockKey
from engine.cache.load_plan import MAX_BATCH, TierRate
from kv_transfer.chunks.block_record import max_record_nbytes
from worker.core.block_load import BlockLoad
from worker.core.host_pages import HostPages
from worker.core.record_check import RecordCheck


class HostFiller:
    """One thread's buffers, and the copies out of them."""

    def __init__(self, check: RecordCheck, rate: TierRate, pages: HostPages) -> None:
        self._check, self._rate, self._pages = check, rate, pages
        self._record_nbytes = max_record_nbytes(check.layout)
        self._into: list[memoryview] = []

    def fill(self, load: BlockLoad, keys: Sequence[BlockKey]) -> None:
        """Fill the next blocks, of these keys, as far as they are here, right, and in time."""
        self._into = self._into or [memoryview(bytearray(self._record_nbytes)) for _ in range(MAX_BATCH)]
        size = load.budget.blocks_per_batch(self._record_nbytes / self._rate.nbytes_per_s)
        for start in range(0, len(keys), size):
            if load.is_over or not self._fill_batch(load, keys[start : start + size], self._into):
                return

    def close(self) -> None:
        """Do nothing: there is no thread of its own."""

    def _fill_batch(self, load: BlockLoad, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> bool:
        """Fill the next blocks; returns whether all of them are in their pages."""
        first, start_s = load.num_done, time.perf_counter()
        sizes = self._check.tier.load(keys, into[: len(keys)])
        is_whole = all(
            self._fill(load, first + index, keys[index], into[index][:nbytes]) for index, nbytes in enumerate(sizes)
        )
        # In bytes of KV, and with the decoding, since plans ask how soon a block is in its pages.
        self._rate.add(len(sizes) * self._record_nbytes, time.perf_counter() - start_s)
        return is_whole and len(sizes) == len(keys)

    def _fill(self, load: BlockLoad, index: int, key: BlockKey, record: memoryview) -> bool:
        """Put a block into its page; returns False if it is not right, or no longer wanted."""
        payload = self._check.kv_of(record, key, load.loss_of(index, key))
        if payload is None or not load.begin_writing():
            return False
        written: list[BlockKey] = []
        try:
            self._pages.write(load.wanted.blocks[index], payload)
            written.append(key)
        finally:
            load.end_writing(index, written)
        self._check.counts["loaded_blocks"] += 1
        return True
