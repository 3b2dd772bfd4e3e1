"""The choice of the way into a pool's pages: the host's, or a GPU's."""

from collections.abc import Sequence

from engine.cache.load_plan import TierRate
from engine.cuda.kv.tier_pages import TierPages
from kv_transfer.chunks.block_record import max_record_nbytes
from kv_transfer.tiers.host_memory import HostMemoryTier
from kv_transfer.tiers.record_files import DIRECT_ALIGNMENT
from worker.core.device_filler import DeviceFiller
from worker.core.host_filler import HostFiller
from worker.core.host_pages import HostPages
from worker.core.record_check import RecordCheck
from worker.core.record_sources import LentRecords, ReaderThreads, RecordReader, RecordSource
from worker.core.tier_loader import NUM_THREADS, BlockFiller

FIRST_GUESSES = {"host": (4e9, 0.0), "disk": (1e9, 0.001), "store": (2e8, 0.002)}
"""Bytes per second, and seconds before the first, until they are measured."""
PINNED_GUESS = 2e10
"""Bytes per second between page-locked memory and a GPU: half of what PCIe 5.0 gives."""
_NUM_READERS = 8
_NUM_BUFFERS = 40
"""The records that a thread has read, or is reading: three batches that are copied, one more, and one ahead."""


def first_guess(tier: str, pages: HostPages | TierPages) -> tuple[float, float]:
    """Return what a tier's TierRate begins with."""
    rate, latency_s = FIRST_GUESSES[tier]
    return (PINNED_GUESS if tier == "host" and isinstance(pages, TierPages) else rate), latency_s


def make_fillers(check: RecordCheck, rate: TierRate, pages: HostPages | TierPages, count: int) -> Sequence[BlockFiller]:
    """Return the fillers of a tier's threads."""
    if isinstance(pages, HostPages):
        return [HostFiller(check, rate, pages) for _ in range(count)]
    return [DeviceFiller(check, rate, pages, source) for source in _sources(check, pages, count)]


def read_nbytes(record_nbytes: int) -> int:
    """Return the page-locked memory that a tier which is read from takes beside a GPU, in bytes."""
    return NUM_THREADS * _NUM_BUFFERS * aligned_nbytes(record_nbytes)


def aligned_nbytes(nbytes: int) -> int:
    """Return the size of a buffer for a record of so many bytes, from which the next one is aligned too."""
    return -(-nbytes // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT


def _sources(check: RecordCheck, pages: TierPages, count: int) -> Sequence[RecordSource]:
    if isinstance(check.tier, HostMemoryTier):
        return [LentRecords(check.tier) for _ in range(count)]
    readers = ReaderThreads(check.tier, _NUM_READERS)
    nbytes = aligned_nbytes(max_record_nbytes(check.layout))
    sources: list[RecordSource] = []
    for _ in range(count):
        memory = pages.pinned(_NUM_BUFFERS * nbytes)
        buffers = [memory[start : start + nbytes] for start in range(0, len(memory), nbytes)]
        sources.append(RecordReader(readers, buffers))
    return sources
