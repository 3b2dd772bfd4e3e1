"""The export of cached blocks to another worker that has the same prefix."""

from collections.abc import Iterable, Sequence

from contracts.ids import BlockId, RequestId
from contracts.kv_loss import EXACT
from engine.backend import PagedCache
from engine.cache.block_pool import BlockPool
from engine.messages import PageChecksums
from engine.sequence_table import SequenceTable

LOAN_SHARE = 0.5
"""The part of the blocks that could be had, cached ones among them, that a peer is given to be filled for it."""


class PrefixExport:
    """The cached blocks that are held while a peer reads them. All calls come between steps.

    A device may still compute them: whoever sends them waits for their `checksums`.
    """

    def __init__(self, table: SequenceTable, pool: BlockPool, cache: PagedCache) -> None:
        self._table, self._pool, self._cache = table, pool, cache

    def count(self, digests: Iterable[bytes], loss: str = EXACT) -> int:
        """Return how many of these blocks are cached, exactly or with this loss, up to the first that is not."""
        return len(self._pool.find_by_digest(digests, loss))

    def hold(self, reader: RequestId, digests: Iterable[bytes]) -> list[BlockId]:
        """Return the cached blocks of these digests up to the first that is not here, held for a new `reader`.

        They are exact: a digest stands for nothing else.
        """
        blocks = self._pool.find_by_digest(digests)
        self._pool.retain(blocks)
        self._table.outgoing_readers[reader] = blocks
        return list(blocks)

    def lend(self, reader: RequestId, count: int) -> list[BlockId]:
        """Return at most so many blocks, to be filled for a reader that has called `hold`.

        They are held like those, and nobody finds them here: their tokens are not known.
        """
        blocks = self._pool.allocate(min(count, int(LOAN_SHARE * self._pool.num_available)))
        self._table.outgoing_readers[reader].extend(blocks)
        return blocks

    def checksums(self, blocks: Sequence[BlockId]) -> PageChecksums | None:
        """Return those of blocks that are held, done once these are computed; None if they are."""
        return self._cache.checksums_behind(blocks)

    def reader_ended(self, reader: RequestId) -> None:
        """Let go what was held for the reader, who reads no more. Idempotent."""
        self._pool.release(self._table.outgoing_readers.pop(reader, []))
