"""The loads of prefixes from lower tiers into pages: of prompts that wait, and of reservations.

What a worker has in its own tiers need not be sent to it: a reservation is loaded before its pages are granted.
"""

from contracts.ids import RequestId
from engine.cache.block_pool import BlockPool
from engine.cache.load_plan import EndedLoad, LowerTiers, PrefixLoad
from engine.sequence import Sequence
from engine.sequence_table import SequenceTable


class ReservedLoads:
    """The loads of reservations that are under way, see Engine.load_reserved."""

    lower_tiers: LowerTiers | None = None

    def __init__(self, table: SequenceTable, pool: BlockPool) -> None:
        self._table, self._pool = table, pool
        self._loading: dict[RequestId, Sequence] = {}

    def begin(self, request_id: RequestId, tokens_per_s: float) -> bool:
        """Return whether a load began."""
        if self.lower_tiers is None:
            return False
        sequence = self._table[request_id]
        load = missing_prefix(sequence, self._pool.block_size)
        if load is None or not self.lower_tiers.begin_reserved(load, tokens_per_s):
            return False
        self._loading[request_id] = sequence
        return True

    def finished(self) -> list[tuple[RequestId, int]]:
        """Return the loads that have ended, and how many tokens of each have their KV by now."""
        if self.lower_tiers is None or not self._loading:
            return []
        ended = self.lower_tiers.finished_reserved()
        return [(load.request_id, self._end(load)) for load in ended]

    def cancel(self, request_id: RequestId) -> None:
        """Give a load up, if there is one: nothing is written to its pages once this returns."""
        if self.lower_tiers is not None and self._loading.pop(request_id, None) is not None:
            self.lower_tiers.cancel(request_id)

    def _end(self, load: EndedLoad) -> int:
        sequence = self._loading.pop(load.request_id)
        end_load(sequence, load, self._pool)
        return sequence.num_computed


def missing_prefix(sequence: Sequence, block_size: int) -> PrefixLoad | None:
    """Return what lower tiers may fill of a sequence that has its pages, or None if that is nothing.

    Its last token is left, for whose logits it is computed.
    """
    first, last = sequence.num_computed // block_size, (len(sequence.tokens) - 1) // block_size
    if first >= last:
        return None
    digests = sequence.extend_digests(block_size, last)
    return PrefixLoad(
        request_id=sequence.request_id,
        first_token=first * block_size,
        num_tokens=len(sequence.tokens),
        parent=digests[first - 1] if first else None,
        digests=digests[first:last],
        blocks=sequence.blocks[first:last],
        loss=sequence.accepted_loss,
        late_s=sequence.late_s,
    )


def end_load(sequence: Sequence, ended: EndedLoad, pool: BlockPool) -> None:
    """Note what a load has brought."""
    block_size, first = pool.block_size, sequence.num_computed // pool.block_size
    pool.groups.fill(sequence.blocks[first : first + ended.num_blocks])
    if ended.num_exact < ended.num_blocks:
        sequence.lose(sequence.num_computed + ended.num_exact * block_size, sequence.accepted_loss)
    sequence.num_computed += ended.num_blocks * block_size
