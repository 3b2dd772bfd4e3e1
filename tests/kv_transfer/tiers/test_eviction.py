"""What a full tier forgets: no cliff past its capacity, dear blocks last, no block without its parent."""

import random
from collections import OrderedDict
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.kv_store import BlockKey, BlockWorth
from kv_transfer.tiers.eviction_policy import EvictionPolicy
from tests.kv_transfer.tiers.block_samples import key_of, worth_of

CAPACITY = 100


class LRU:
    """The policy to beat."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._held = capacity, OrderedDict[BlockKey, None]()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._held

    def use(self, keys: Iterable[BlockKey]) -> None:
        for key in reversed(list(keys)):
            if key in self._held:
                self._held.move_to_end(key)

    def add(self, key: BlockKey, nbytes: int, worth: BlockWorth) -> list[BlockKey]:
        self._held[key] = None
        return [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self._capacity)]


def hit_rate(policy: EvictionPolicy | LRU, turns: Iterable[list[int]], skip: int) -> float:
    """Return the share of blocks found, after `skip` turns; each turn is a prompt's blocks, first to last."""
    hits = total = 0
    for number, blocks in enumerate(turns):
        keys = [key_of(block) for block in blocks]
        held = next((i for i, key in enumerate(keys) if key not in policy), len(keys))
        policy.use(keys[:held])
        for index in range(held, len(keys)):
            if keys[index] not in policy:
                policy.add(keys[index], 1, worth_of(blocks[index], blocks[index - 1] if index else None))
        if number >= skip:
            hits, total = hits + held, total + len(keys)
    return hits / total


def conversations_in_turn(count: int, num_blocks: int, rounds: int) -> list[list[int]]:
    """Return the prompts of `count` users who come back one after the other: the trace on which LRU finds nothing."""
    return [[user * 1000 + block for block in range(num_blocks)] for _ in range(rounds) for user in range(count)]


@pytest.mark.parametrize(("count", "least"), [(9, 0.99), (11, 0.85), (13, 0.7), (15, 0.6), (18, 0.45), (20, 0.2)])
def test_has_no_cliff_where_lru_has_one(count: int, least: float):
    """Ten of these conversations fit; an oracle finds 10 / count of them."""
    turns = conversations_in_turn(count, 10, 40)
    assert hit_rate(EvictionPolicy(CAPACITY), turns, 20 * count) >= least
    if count > 10:
        assert hit_rate(LRU(CAPACITY), turns, 20 * count) == 0.0


def test_finds_most_of_what_lru_finds_when_users_come_back_soon():
    """Growing conversations, the newest likeliest to go on: LRU's best trace."""
    drawn = random.Random(7)
    lengths: dict[int, int] = {}
    turns = []
    for number in range(4000):
        user = max(0, number // 8 - int(drawn.expovariate(1 / 6)))
        lengths[user] = min(lengths.get(user, 0) + 2, 20)
        turns.append([user * 1000 + block for block in range(lengths[user])])
    ours = hit_rate(EvictionPolicy(CAPACITY), turns, 1000)
    assert ours >= 0.9 * hit_rate(LRU(CAPACITY), turns, 1000)


def test_gets_over_a_working_set_that_is_gone():
    policy = EvictionPolicy(CAPACITY)
    hit_rate(policy, conversations_in_turn(10, 10, 30), 0)
    others = [[100_000 + block for block in turn] for turn in conversations_in_turn(9, 10, 60)]
    assert hit_rate(policy, others, 50 * 9) > 0.95


def test_keeps_what_is_dear():
    """Fifteen prompts of one block in turn, room for ten: of those that take ten times as long more stay."""
    policy, hits = EvictionPolicy(10), {True: 0, False: 0}
    drawn = random.Random(1)
    for _ in range(3000):
        number = drawn.randrange(15)
        is_dear = number % 2 == 0
        if key_of(number) in policy:
            hits[is_dear] += 1
            policy.use([key_of(number)])
        else:
            policy.add(key_of(number), 1, BlockWorth(compute_s=1.0 if is_dear else 0.1))
    assert hits[True] / 8 > 1.3 * hits[False] / 7


def test_refuses_a_block_that_is_larger_than_itself():
    policy = EvictionPolicy(10)
    assert policy.add(key_of(1), 11, worth_of(1)) == [key_of(1)]
    assert len(policy) == policy.nbytes == 0


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8), st.integers(1, 4)), max_size=120), st.integers(4, 30))
def test_accounts_for_every_block_and_leaves_no_orphan(prompts: list[tuple[int, int, int]], capacity: int):
    policy, held = EvictionPolicy(capacity), dict[BlockKey, int]()
    for user, num_blocks, nbytes in prompts:
        chain = [key_of(user * 100 + index) for index in range(num_blocks)]
        policy.use(key for key in chain if key in held)
        for index, key in enumerate(chain):
            if key in held or (index and chain[index - 1] not in held):
                continue
            held[key] = nbytes
            for gone in policy.add(key, nbytes, worth_of(0, user * 100 + index - 1 if index else None)):
                del held[gone]
        assert policy.nbytes == sum(held.values()) <= capacity
        assert len(policy) == len(held) and all(key in policy for key in held)
    for user in range(13):
        chain = [key_of(user * 100 + index) in held for index in range(8)]
        assert chain == sorted(chain, reverse=True), "a block is held without the one before it"
