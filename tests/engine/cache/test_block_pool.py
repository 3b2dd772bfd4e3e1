"""BlockPool: what it promises, and that no order of operations breaks its accounting."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.errors import OutOfBlocks
from contracts.hashing import chain_hashes
from contracts.ids import BlockId
from engine.cache.block_pool import BlockPool

SIZE = 4


def fill(pool: BlockPool, token_ids: list[int]) -> list[BlockId]:
    """Fill the pool as the engine does: take the cached prefix, allocate the rest, insert full blocks."""
    digests = chain_hashes(token_ids, SIZE)
    blocks = find(pool, token_ids)
    pool.retain(blocks)
    blocks += pool.allocate(-(-len(token_ids) // SIZE) - len(blocks))
    for index, digest in enumerate(digests):
        pool.insert(blocks[index], digest, token_ids[index * SIZE : (index + 1) * SIZE])
    return blocks


def find(pool: BlockPool, token_ids: list[int]) -> list[BlockId]:
    return pool.find(chain_hashes(token_ids, SIZE), token_ids)


def test_a_released_prefix_is_found_again():
    pool = BlockPool(8, SIZE)
    blocks = fill(pool, list(range(10)))
    pool.release(blocks)
    assert pool.num_available == 8 and pool.num_cached == 2
    assert find(pool, list(range(10))) == blocks[:2]
    assert pool.num_held == 0


def test_what_is_found_takes_room_only_once_it_is_held():
    pool = BlockPool(3, SIZE)
    first = fill(pool, [1] * SIZE)
    pool.release(first)
    assert pool.fits(2, first) and not pool.fits(3, first) and pool.fits(3, [])
    pool.retain(first)
    assert pool.fits(2, first) and not pool.fits(3, first)


def test_only_what_is_let_go_or_enters_the_cache_may_make_room():
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(2)
    pool.retain(blocks)
    pool.release(blocks)
    assert pool.num_gains == 0
    pool.insert(blocks[0], chain_hashes([1] * SIZE, SIZE)[0], [1] * SIZE)
    assert pool.num_gains == 1
    pool.release(blocks)
    assert pool.num_gains == 3


def test_a_block_keeps_its_first_digest():
    """With two, one of them would find it when it holds something else."""
    pool = BlockPool(2, 2)
    (block,) = pool.allocate(1)
    pool.insert(block, b"one", [1, 2])
    pool.insert(block, b"two", [3, 4])
    assert pool.find([b"one"], [1, 2]) == [block] and pool.find([b"two"], [3, 4]) == []
    pool.check()


def test_equal_digests_with_other_tokens_are_no_match():
    pool = BlockPool(4, SIZE)
    fill(pool, [1, 2, 3, 4])
    assert pool.find(chain_hashes([1, 2, 3, 4], SIZE), [1, 2, 3, 5]) == []


def test_the_least_recently_used_block_is_evicted_first():
    pool = BlockPool(2, SIZE)
    old, new = fill(pool, [1] * SIZE), fill(pool, [2] * SIZE)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == old
    assert find(pool, [1] * SIZE) == []
    assert find(pool, [2] * SIZE) == new


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
    assert find(pool, [1] * SIZE) == []


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
        """`fill` failed after its match: find those blocks again and drop their holds."""
        self.pool.release(find(self.pool, token_ids))

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
