"""The marks of a tier: which prefixes it holds, and what changed."""

from collections import Counter
from random import Random

import pytest

from contracts.held_prefixes import (
    PREFIX_BLOCK_TOKENS,
    PREFIX_DEPTHS,
    HeldPrefixes,
    marked_blocks,
    prefix_lengths,
)

BLOCK = 16
MARKED = sorted(marked_blocks(BLOCK))


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


@pytest.mark.parametrize(("block_size", "first"), [(16, 4), (64, 1), (128, 1), (24, 8)])
def test_depths_that_are_whole_blocks_are_marked(block_size: int, first: int) -> None:
    """128 tokens are two blocks of 64, 192 are eight of 24."""
    marked = marked_blocks(block_size)
    assert min(marked) == first
    assert all(n * block_size == depth * PREFIX_BLOCK_TOKENS for n, depth in marked.items())
    assert {*marked.values()} <= {*PREFIX_DEPTHS}


def test_who_follows_the_changes_knows_what_is_held() -> None:
    """Each change is told once, the last one counts, and what is no mark is never told."""
    random, held, known = Random(5), HeldPrefixes(BLOCK), Counter()
    truth: set[bytes] = set()
    for _ in range(3000):
        number = random.randrange(60)
        if random.random() < 0.6:
            held.add(key_of(number), MARKED[number % len(MARKED)] if number % 3 else 5)
            truth |= {key_of(number)} if number % 3 else set()
        elif random.random() < 0.02:
            held.clear()
            truth.clear()
        else:
            held.remove(key_of(number))
            truth.discard(key_of(number))
        if random.random() < 0.1:
            for key, is_held in held.take_changes():
                known[key] = is_held
            assert {key for key, is_held in known.items() if is_held} == truth
    assert held.take_changes() == [] or truth


def test_the_newest_marks_are_kept() -> None:
    held = HeldPrefixes(BLOCK, max_marks=10)
    for number in range(25):
        held.add(key_of(number), MARKED[0])
    held.take_changes()
    held.add(key_of(15), MARKED[0])  # used again: now 16 is the oldest
    held.add(key_of(99), MARKED[0])
    assert dict(held.take_changes()) == {key_of(99): True, key_of(16): False}


def test_changes_that_nobody_takes_stay_few() -> None:
    held = HeldPrefixes(BLOCK, max_marks=10)
    for number in range(1000):
        held.add(key_of(number), MARKED[0])
    assert len(held.take_changes()) <= 20


def test_each_sight_of_a_block_in_a_shared_store_is_news() -> None:
    own, shared = HeldPrefixes(BLOCK), HeldPrefixes(BLOCK, is_shared=True)
    told = []
    for held in (own, shared):
        for _ in range(2):
            held.add(key_of(1), MARKED[0])
            told.append(held.take_changes())
    assert told == [[(key_of(1), True)], [], [(key_of(1), True)], [(key_of(1), True)]]


def test_without_a_block_size_nothing_is_marked() -> None:
    held = HeldPrefixes()
    held.add(key_of(1), MARKED[0])
    assert held.take_changes() == []


def test_only_blocks_behind_a_whole_prefix_have_a_length() -> None:
    """Two answers to one prompt, whatever the order they are found in; the end of another prompt has lost its start."""
    random = Random(1)
    parents = {key_of(1): None, key_of(2): key_of(1), key_of(3): key_of(2), key_of(4): key_of(2)}
    parents |= {key_of(8): key_of(7), key_of(9): key_of(8)}
    shuffled = dict(random.sample([*parents.items()], len(parents)))
    assert prefix_lengths(shuffled) == {key_of(1): 1, key_of(2): 2, key_of(3): 3, key_of(4): 3}
