"""The check of the records that a tier gives: what is not to be believed is told once, and forgotten."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from contracts.errors import Corrupt, LayoutMismatch
from contracts.kv_store import BlockKey, KVStore
from contracts.layout import KVLayout
from kv_transfer.chunks.block_record import RAW, StatedBlock, VerifiedBlock, read_stated, sums_of_pages, verify
from kv_transfer.tiers.record_codec import RecordCodec

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
DIFFERS = "checksum differs: the pages on the device are not what was written"


class RecordCheck:
    """The verdicts about one tier's records."""

    def __init__(self, tier: KVStore, layout: KVLayout, codec: RecordCodec) -> None:
        self.tier, self.layout, self._codec = tier, layout, codec
        self.counts = Counter(dict.fromkeys(("loaded_blocks", "refused_blocks"), 0))
        self._named: set[str] = set()

    def kv_of(self, record: memoryview, key: BlockKey, loss: str) -> np.ndarray | None:
        """Return the KV of a block, or None for a record that is not to be believed, which is evicted.

        `loss`: that of its key.
        """
        return self._read(key, lambda: self._codec.read(verify(record, key, self.layout), loss))

    def stated_kv_of(self, record: memoryview, key: BlockKey, loss: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return a block's KV, and the checksums of its pages, with which a device has to compare them.

        None for a record that is not to be believed by then, as `kv_of`.
        """
        return self._read(key, lambda: self._stated(read_stated(record, key, self.layout), loss))

    def refuse(self, key: BlockKey, reason: str) -> None:
        """Forget a record that is not what it says; the first of each kind is told."""
        field_name = reason.split(" ", 1)[0]
        self.counts["refused_blocks"] += 1
        if field_name not in self._named:
            self._named.add(field_name)
            _log.warning("KV from the %s tier is refused and forgotten: %s", self.tier.name, reason)
        self.tier.evict([key])

    def _stated(self, block: StatedBlock, loss: str) -> tuple[np.ndarray, np.ndarray]:
        if block.sums is not None:
            return block.payload, block.sums
        pages = block.payload
        if block.facts.codec != RAW:
            pages = self._codec.read(VerifiedBlock(block.facts, block.payload), loss)
        return pages, sums_of_pages(pages, self.layout)

    def _read(self, key: BlockKey, read: Callable[[], Result]) -> Result | None:
        try:
            return read()
        except (Corrupt, LayoutMismatch) as error:
            self.refuse(key, str(error))
        return None
