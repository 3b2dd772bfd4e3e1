"""The way of computed blocks into the prefix cache.

KV that has lost something enters it under a digest of its own, for requests that take it, or not at all.
"""

from contracts.hashing import inexact_digest
from engine.cache.block_pool import BlockPool
from engine.cache.load_plan import LowerTiers, NewBlock
from engine.sequence import Sequence

MAX_LATE_BLOCKS = 16
"""So many blocks of a prompt that came from elsewhere enter the prefix cache in a step: all of a long prompt at once
would keep the tokens of the step before for a millisecond. What is left when the answer ends, or gives its blocks back
to be computed again, enters then.
"""


class PrefixInserter:
    """The full blocks of sequences, findable in the pool once they are computed.

    `caches_decoded_kv`: those of answers as well, see engine.backend.Backend. What is new is offered to
    `lower_tiers`, if there are any.
    """

    lower_tiers: LowerTiers | None = None

    def __init__(self, pool: BlockPool, caches_decoded_kv: bool) -> None:
        self._pool, self._caches_decoded_kv = pool, caches_decoded_kv

    def insert_all(self, sequence: Sequence) -> None:
        self._insert(sequence, len(sequence.blocks))

    def insert_some(self, sequence: Sequence) -> None:
        """Enter MAX_LATE_BLOCKS at most."""
        self._insert(sequence, MAX_LATE_BLOCKS)

    def _insert(self, sequence: Sequence, max_blocks: int) -> None:
        size = self._pool.block_size
        num_known = len(sequence.tokens) - sequence.num_pending if self._caches_decoded_kv else sequence.num_prefilled
        num_full = min(sequence.num_computed, num_known) // size
        if sequence.loss and sequence.loss != sequence.accepted_loss:  # nobody would take it
            num_full = min(num_full, sequence.first_inexact // size)
        if num_full <= sequence.num_inserted_blocks:
            return
        num_full = min(num_full, sequence.num_inserted_blocks + max_blocks)
        sequence.extend_digests(size, num_full)
        for index in range(sequence.num_inserted_blocks, num_full):
            token_ids = sequence.tokens[index * size : (index + 1) * size]
            digest = _digest(sequence, index, size)
            is_new = self._pool.insert(sequence.blocks[index], digest, token_ids)
            # A tier keeps whole blocks: of KV that came from elsewhere pages of a group of short life may be missing.
            if is_new and self.lower_tiers is not None and not self._pool.groups.lacks(sequence.blocks[index]):
                self.lower_tiers.offer(
                    NewBlock(
                        block=sequence.blocks[index],
                        generation=self._pool.generations[sequence.blocks[index]],
                        digest=digest,
                        parent=_digest(sequence, index - 1, size) if index else None,
                        first_token=index * size,
                        loss=sequence.loss_before((index + 1) * size),
                        is_decoded=(index + 1) * size > sequence.num_prefilled,
                    )
                )
        sequence.num_inserted_blocks = num_full


def _digest(sequence: Sequence, index: int, size: int) -> bytes:
    """Return the digest under which a block of the sequence may be found; that of its tokens is known."""
    digest, loss = sequence.digests[index], sequence.loss_before((index + 1) * size)
    return inexact_digest(digest, loss) if loss else digest
