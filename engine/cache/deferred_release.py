"""The blocks that become free once the device is done with them."""

from collections.abc import Iterator, Sequence

from engine.cache.block_pool import BlockPool
from engine.page_lease import PageLease


class DeferredRelease:
    """The blocks that were let go while a batch was being computed, which may still write to them.

    The next to hold them may be a transfer, which is on no stream of the engine's.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._deferred: list[tuple[int, Sequence[int], PageLease | None]] = []
        self._num_launched = self._num_completed = 0

    @property
    def num_in_flight(self) -> int:
        """The batches that are being computed."""
        return self._num_launched - self._num_completed

    def on_launched(self) -> None:
        self._num_launched += 1

    def on_completed(self) -> None:
        """Free what was let go before the next batch was launched, now that the oldest has been computed."""
        self._num_completed += 1
        while self._deferred and self._deferred[0][0] <= self._num_completed:
            _, blocks, lease = self._deferred.pop(0)
            self._let_go(blocks, lease)

    def release(self, blocks: Sequence[int], lease: PageLease | None = None) -> None:
        """Let blocks go, and the pages of `lease` with them."""
        if self.num_in_flight == 0:
            self._let_go(blocks, lease)
        else:
            self._deferred.append((self._num_launched, list(blocks), lease))

    def holds(self) -> Iterator[int]:
        """Return the blocks that are held here, once for each hold."""
        return (block for _, blocks, _ in self._deferred for block in blocks)

    def leases(self) -> set[PageLease]:
        """Return the leases that end here."""
        return {lease for _, _, lease in self._deferred if lease is not None}

    def _let_go(self, blocks: Sequence[int], lease: PageLease | None) -> None:
        self._pool.groups.end(lease)
        self._pool.release(blocks)
