"""The export of cached blocks to another worker that has the same prefix."""

from collections.abc import Iterable

from contracts.ids import BlockId, RequestId
from contracts.kv_loss import EXACT
from engine.cache.block_pool import BlockPool
from engine.sequence_table import SequenceTable


class PrefixExport:
    """The cached blocks that are held while a peer reads them. All calls come between steps.

    Their KV is computed: a device that computes behind the host's back needs more than this, see
    engine.backend.PagedCache.
    """

    def __init__(self, table: SequenceTable, pool: BlockPool) -> None:
        self._table, self._pool = table, pool

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
        return blocks

    def reader_ended(self, reader: RequestId) -> None:
        """Let go what was held for the reader, who reads no more. Idempotent."""
        self._pool.release(self._table.outgoing_readers.pop(reader, []))
