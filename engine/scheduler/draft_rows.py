"""The rows that drafts add to a step, and the KV blocks that these take for as long as it lasts."""

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from engine.cache.block_pool import BlockPool
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from engine.speculative.speculator import Speculator


class DraftRows:
    """A sequence with a draft of k tokens asks for 1 + k rows.

    Nobody gives blocks up for a draft: it is cut to what is free beside the block that each running sequence may need.
    """

    def __init__(self, pool: BlockPool, speculator: Speculator) -> None:
        self._pool, self._speculator = pool, speculator

    def add(self, decodes: SequenceOf[ScheduledChunk], num_running: int, max_rows: int) -> list[ScheduledChunk]:
        """Return the decodes of a step with their drafts, of at most `max_rows` tokens together."""
        drafts = self._speculator.propose([piece.sequence for piece in decodes], max_rows)
        pieces: list[ScheduledChunk] = []
        for piece, draft in zip(decodes, drafts, strict=True):
            draft = draft.first(self._make_room(piece.sequence, len(draft), num_running))
            pieces.append(replace(piece, draft=draft) if draft else piece)
        return pieces

    def give_back(self, sequence: Sequence) -> None:
        """Let the blocks go that a draft took and its accepted tokens do not need."""
        num_blocks = self._num_blocks(len(sequence.tokens))
        unused = sequence.blocks[num_blocks:]
        if unused:
            # Another array: a runner knows by the array whose table a device has.
            sequence.blocks = array("i", sequence.blocks[:num_blocks])
            if sequence.lease is not None:
                self._pool.groups.drop_behind(sequence.lease, num_blocks)
            self._pool.release(unused)

    def _make_room(self, sequence: Sequence, num_tokens: int, num_spare: int) -> int:
        """Take the blocks of a draft, as far as there are any.

        Returns for how many of its tokens there is room.
        """
        held = len(sequence.blocks)
        missing = self._num_blocks(len(sequence.tokens) + num_tokens) - held
        taken = max(0, min(missing, self._pool.num_available - num_spare))
        if taken:
            sequence.blocks.extend(self._pool.allocate(taken))
        return min(num_tokens, (held + taken) * self._pool.block_size - len(sequence.tokens))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)
