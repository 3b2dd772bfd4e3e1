"""The export of a running answer, whose KV is told while it goes on.

    exports.begin(request_id, ...)   what moves is kept from now on
    exports.blocks(request_id)       full blocks, as often as wanted, while the answer is decoded
    exports.pause(request_id)        no further step
    exports.tail(request_id)         the rest, once no token of it is being computed
    exports.resume(request_id)       it stays here after all;  or Engine.release, it goes on elsewhere
    exports.reader_ended(request_id) nobody reads what was told any more

What was told is held for its reader beside the request. It stays right whatever becomes of the request here: of a
preempted one, the KV of these tokens is computed again in other blocks, and later ones come from there.
"""

from collections.abc import Callable

from contracts.errors import OutOfBlocks
from contracts.ids import BlockId, RequestId
from engine.backend import PagedCache
from engine.cache.block_pool import BlockPool
from engine.messages import AnswerTail, ChunkDone
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence, Status
from engine.sequence_table import OutgoingReader, SequenceTable


class AnswerExport:
    """See the module's docstring. All calls come between steps; an unknown request raises KeyError.

    `settle`: see engine.backend.Drafter; called before the last of a sequence is told.
    """

    def __init__(
        self,
        table: SequenceTable,
        scheduler: Scheduler,
        pool: BlockPool,
        cache: PagedCache,
        settle: Callable[[Sequence], None],
    ) -> None:
        self._table, self._scheduler, self._pool, self._cache = table, scheduler, pool, cache
        self._settle = settle

    def begin(self, request_id: RequestId, num_known: int, most_tokens: int) -> None:
        """Keep what an answer is moved with that grows from `num_known` tokens to `most_tokens` meanwhile.

        Raises OutOfBlocks if there is no room for that, or some of it is gone; always for recurrent layers, whose state
        is overwritten while it would be read.
        """
        sequence, groups = self._table[request_id], self._pool.groups
        if groups.has_states:
            raise OutOfBlocks("the state of its recurrent layers is overwritten as it goes on")
        if sequence.lease is None:
            raise OutOfBlocks("the answer has no KV blocks now")
        blocks = sequence.blocks[: sequence.num_computed // self._pool.block_size]
        longest = max(most_tokens, _longest(sequence))
        if not groups.pin(sequence.lease, blocks, num_known, most_tokens, longest):
            raise OutOfBlocks("the KV cache has no room for a window that grows, or has lost its begin")
        self._table.outgoing_readers[request_id] = OutgoingReader([], sequence.lease)

    def is_kept(self, request_id: RequestId) -> bool:
        """Return whether all is here that `begin` was to keep: not if the answer was preempted since."""
        reader = self._table.outgoing_readers.get(request_id)
        return reader is not None and self._table[request_id].lease is reader.lease

    def blocks(self, request_id: RequestId) -> ChunkDone | None:
        """Tell the full blocks that are computed and were not told yet.

        None if there are none, also while a preempted answer is computed again.
        """
        sequence = self._table[request_id]
        if not _is_moving(sequence):
            return None
        size = self._pool.block_size
        return self._tell(sequence, (len(sequence.tokens) - 1) // size * size)

    def pause(self, request_id: RequestId) -> bool:
        """Leave the answer out of the batches that are launched from now on.

        False, and it goes on, if it is not being decoded: it waits, or is to be computed again.
        """
        sequence = self._table[request_id]
        if sequence.status is not Status.RUNNING or not _is_moving(sequence):
            return False
        self._scheduler.remove(sequence)
        sequence.status = Status.PAUSED
        return True

    def tail(self, request_id: RequestId) -> AnswerTail | None:
        """Tell the rest of a paused answer, once; None while its last batch is being computed.

        That batch may end the answer: then the request is unknown, as after any end.
        """
        sequence = self._table[request_id]
        if sequence.status is not Status.PAUSED or not sequence.is_decoding:
            return None
        self._settle(sequence)
        num_tokens = len(sequence.tokens) - 1
        return AnswerTail(self._tell(sequence, num_tokens), num_tokens)

    def resume(self, request_id: RequestId) -> None:
        """Go on here with an answer that may be paused. Nothing to do for one that is not, or is unknown."""
        sequence = self._table.get(request_id)
        if sequence is not None and sequence.status is Status.PAUSED:
            self._scheduler.resume(sequence)

    def reader_ended(self, request_id: RequestId) -> None:
        """Let go what was told: nobody reads it any more. Idempotent.

        What is told from now on begins at the first token again.
        """
        sequence, reader = self._table.get(request_id), self._table.outgoing_readers.pop(request_id, None)
        if reader is not None:
            self._let_go(reader, sequence)
        if sequence is not None:
            sequence.num_exported = 0

    def _tell(self, sequence: Sequence, end: int) -> ChunkDone | None:
        """Hold and tell the blocks from the last one that was told up to token `end`."""
        first, size = sequence.num_exported, self._pool.block_size
        if end <= first:
            return None
        blocks = [BlockId(block) for block in sequence.blocks[first // size : -(-end // size)]]
        self._pool.retain(blocks)
        reader = OutgoingReader([], self._pool.groups.nothing())  # unless what moves is kept
        self._table.outgoing_readers.setdefault(sequence.request_id, reader).blocks.extend(blocks)
        sequence.num_exported = end
        checksums, loss = self._cache.checksums(blocks), sequence.loss_before(end)
        return ChunkDone(sequence.request_id, first, end - first, blocks, checksums, loss)

    def _let_go(self, reader: OutgoingReader, sequence: Sequence | None) -> None:
        if sequence is not None and sequence.lease is reader.lease:
            self._pool.groups.unpin(reader.lease, sequence.num_computed, _longest(sequence))
        else:
            self._pool.groups.end(reader.lease)
        self._pool.release(reader.blocks)


def _longest(sequence: Sequence) -> int:
    """Return the most tokens that a sequence may have."""
    return max(len(sequence.tokens), sequence.answer_start + sequence.sampling.max_tokens)


def _is_moving(sequence: Sequence) -> bool:
    """Return whether all KV before the newest token's is computed.

    True also while the device computes that of the newest, for the token after.
    """
    is_here = sequence.status in (Status.RUNNING, Status.PAUSED) and not sequence.handoff
    return is_here and sequence.has_grown and sequence.num_computed >= len(sequence.tokens) - 1
