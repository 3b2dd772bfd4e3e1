"""BlockPool: what it promises, and that no order of operations breaks its accounting."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.errors import OutOfBlocks
from contracts.hashing import chain_hashes
from contracts.ids import BlockId
from engine.block_pool import BlockPool

SIZE = 4


def fill(pool: BlockPool, token_ids: list[int]) -> list[BlockId]:
    """As the engine does: take the cached prefix, allocate the rest, insert what is full."""
    digests = chain_hashes(token_ids, SIZE)
    blocks = list(pool.match(digests, token_ids))
    blocks += pool.allocate(-(-len(token_ids) // SIZE) - len(blocks))
    for index, digest in enumerate(digests):
        pool.insert(blocks[index], digest, token_ids[index * SIZE : (index + 1) * SIZE])
    return blocks


def test_a_released_prefix_is_found_again():
    pool = BlockPool(8, SIZE)
    blocks = fill(pool, list(range(10)))
    pool.release(blocks)
    assert pool.num_available == 8 and pool.num_cached == 2
    assert pool.match(chain_hashes(list(range(10)), SIZE), list(range(10))) == blocks[:2]
    assert pool.num_held == 2


def test_equal_digests_with_other_tokens_are_no_match():
    pool = BlockPool(4, SIZE)
    fill(pool, [1, 2, 3, 4])
    assert pool.match(chain_hashes([1, 2, 3, 4], SIZE), [1, 2, 3, 5]) == []


def test_the_least_recently_used_block_is_evicted_first():
    pool = BlockPool(2, SIZE)
    old, new = fill(pool, [1] * SIZE), fill(pool, [2] * SIZE)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == old
    assert pool.match(chain_hashes([1] * SIZE, SIZE), [1] * SIZE) == []
    assert pool.match(chain_hashes([2] * SIZE, SIZE), [2] * SIZE) == new


def test_a_sequence_loses_its_tail_first():
    pool = BlockPool(3, SIZE)
    blocks = fill(pool, list(range(12)))
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]


def test_generations_count_losses_of_content():
    pool = BlockPool(2, SIZE)
    (plain,) = pool.allocate(1)
    pool.release([plain])
    assert pool.generations[plain] == 1
    cached = fill(pool, [7] * SIZE)
    before = pool.generations[cached[0]]
    pool.release(cached)
    assert pool.generations[cached[0]] == before
    pool.allocate(2)
    assert pool.generations[cached[0]] == before + 1


def test_too_many_blocks_takes_none():
    pool = BlockPool(3, SIZE)
    with pytest.raises(OutOfBlocks, match="4 KV blocks wanted, 3 of 3 available"):
        pool.allocate(4)
    assert pool.num_available == 3


def test_without_prefix_cache_nothing_is_found():
    pool = BlockPool(2, SIZE, prefix_cache=False)
    pool.release(fill(pool, [1] * SIZE))
    assert pool.match(chain_hashes([1] * SIZE, SIZE), [1] * SIZE) == []


def test_releasing_too_often_is_our_own_error():
    pool = BlockPool(1, SIZE)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.release(blocks)


def test_check_sees_a_block_in_two_states():
    pool = BlockPool(2, SIZE)
    blocks = pool.allocate(1)
    pool._free.append(blocks[0])
    with pytest.raises(AssertionError, match="block 0: 1 holds, idle 1 times"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random users of one small pool; each owns what it took."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, SIZE)
        self.owned: list[list[BlockId]] = []

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def take(self, token_ids: list[int]) -> None:
        before = self.pool.num_held
        try:
            self.owned.append(fill(self.pool, token_ids))
        except OutOfBlocks:
            self.pool.check()
            matched = self.pool.num_held - before
            assert matched + self.pool.num_available < -(-len(token_ids) // SIZE) + self.pool.num_held
            self._give_back_match(token_ids)

    def _give_back_match(self, token_ids: list[int]) -> None:
        """`fill` failed after its match: find those blocks again and drop both holds."""
        blocks = self.pool.match(chain_hashes(token_ids, SIZE), token_ids)
        self.pool.release(blocks)
        self.pool.release(blocks)

    @precondition(lambda self: self.owned)
    @rule(index=st.integers(0, 100))
    def give_back(self, index: int) -> None:
        self.pool.release(self.owned.pop(index % len(self.owned)))

    @precondition(lambda self: self.owned)
    @rule(index=st.integers(0, 100))
    def share(self, index: int) -> None:
        blocks = self.owned[index % len(self.owned)]
        self.pool.retain(blocks)
        self.owned.append(list(blocks))

    @invariant()
    def sound(self) -> None:
        self.pool.check()
        assert self.pool.num_held == len({block for blocks in self.owned for block in blocks})


TestPoolMachine = PoolMachine.TestCase
