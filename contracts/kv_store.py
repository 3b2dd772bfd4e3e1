"""The interface of what keeps blocks of KV below the device's pool.

That is host memory, a disk, or a store that several workers share.

A block is what one block of the KV cache holds in all planes of one group of layers, whatever the number of shards. It
is kept as a record (kv_transfer.chunks.block_record), which states whose KV it is; a store does not look inside.
"""

from collections.abc import Iterable, Sequence
from typing import NewType, Protocol

import msgspec

from contracts.held_prefixes import HeldPrefixes

BlockKey = NewType("BlockKey", bytes)
"""The digest of all that a block's KV depends on: model, layout, group, salt, and every token up to its end."""


class BlockWorth(msgspec.Struct, frozen=True, kw_only=True):
    """The reasons to keep a block, for a store that has to choose.

    `compute_s` is what its KV would take to compute again, in seconds. Without the block before it, `parent`, it is of
    no use; that is None for the first of a prompt. `num_blocks`: of the prompt up to its end; 0 if that is not known.
    """

    compute_s: float
    parent: BlockKey | None = None
    num_blocks: int = 0


class KVStore(Protocol):
    """A tier of the KV cache.

    It never raises for bad luck: what is lost, full, slow or gone is a block that it does not hold.

    `name` is for metrics and logs. `is_local` says that `lookup` reads an index in memory, and waits for nothing.
    `held` notes which prefixes it holds; of a store that others write as well, as far as this process knows.
    """

    name: str
    is_local: bool
    held: HeldPrefixes

    @property
    def is_on(self) -> bool:
        """Return whether it takes and gives blocks now: a tier that fails switches itself off, and on again."""
        ...

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Return how many of `keys` it holds, counted from the first without a gap. A read may still fail."""
        ...

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[int]:
        """Read the records of `keys` into the buffers, one for each.

        Returns the bytes of those that were read, which ends before the first that could not be. They are as they were
        found: whoever uses one verifies it first.
        """
        ...

    def store(self, key: BlockKey, record: memoryview, worth: BlockWorth) -> bool:
        """Keep a record, evicting others if it must.

        Returns False if it was not kept. A key's record never changes.
        """
        ...

    def evict(self, keys: Iterable[BlockKey]) -> None:
        """Forget these: they were found faulty, or are unwanted. A key that is not held is no error."""
        ...

    def stats(self) -> dict[str, float]:
        """Return its counters and gauges, by metric names without a prefix."""
        ...

    def close(self) -> None:
        """Write nothing any more. Idempotent."""
        ...
