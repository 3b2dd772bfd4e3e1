"""The export of cached blocks to another worker that has the same prefix."""

from collections.abc import Iterable, Sequence

from contracts.ids import BlockId, RequestId
from contracts.kv_loss import EXACT
from engine.backend import PagedCache
from engine.cache.block_pool import BlockPool
from engine.messages import PageChecksums
from engine.sequence_table import OutgoingReader, SequenceTable

LOAN_SHARE = 0.5
"""The part of the blocks that could be had, cached ones among them, that a peer is given to be filled for it."""


class PrefixExport:
    """The cached blocks that are held while a peer reads them. All calls come between steps.

    A device may still compute them: whoever sends them waits for their `checksums`.
    """

    def __init__(self, table: SequenceTable, pool: BlockPool, cache: PagedCache) -> None:
        self._table, self._pool, self._cache = table, pool, cache

    def count(self, digests: Iterable[bytes], loss: str = EXACT) -> int:
        """Return how many of these first blocks are cached without a gap, exactly or with this loss.

        A prompt can go on behind them: the pages that it needs of groups of short life are here, too.
        """
        return self._pool.groups.usable(self._pool.find_by_digest(digests, loss))

    def hold(self, reader: RequestId, digests: Iterable[bytes], first_token: int = 0) -> list[BlockId]:
        """Return the cached blocks of these digests up to the first that is not here, held for a new `reader`.

        They are exact: a digest stands for nothing else. They begin at `first_token` of their prompt, and are as many
        as one can go on behind who has those before.
        """
        groups, size = self._pool.groups, self._pool.block_size
        blocks, first_block = self._pool.find_by_digest(digests), first_token // size
        blocks = blocks[: groups.usable(blocks, first_block)]
        end = first_token + len(blocks) * size
        lease = groups.open(end)
        if lease is None:
            lease, blocks, end = groups.nothing(), [], first_token
        groups.cover(lease, blocks, end, end, end, first_block)
        self._pool.retain(blocks)
        self._table.outgoing_readers[reader] = OutgoingReader(blocks, lease)
        return list(blocks)

    def lend(self, reader: RequestId, count: int) -> list[BlockId]:
        """Return at most so many blocks, to be filled for a reader that has called `hold`.

        They are held like those, and nobody finds them here: their tokens are not known.
        """
        blocks = self._pool.allocate(min(count, int(LOAN_SHARE * self._pool.num_available)))
        self._table.outgoing_readers[reader].blocks.extend(blocks)
        self._pool.groups.fill(blocks)
        return blocks

    def checksums(self, blocks: Sequence[BlockId]) -> PageChecksums | None:
        """Return those of blocks that are held, done once these are computed; None if they are."""
        return self._cache.checksums_behind(blocks)

    def reader_ended(self, reader: RequestId) -> None:
        """Let go what was held for the reader, who reads no more. Idempotent."""
        if held := self._table.outgoing_readers.pop(reader, None):
            self._pool.groups.end(held.lease)
            self._pool.release(held.blocks)
