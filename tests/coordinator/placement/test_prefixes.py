"""The hashes of prompts by which placement remembers who served them."""

from random import Random

import pytest

from contracts.hashing import salted
from coordinator.placement.prefixes import BLOCK_TOKENS, DEPTHS, MAX_BLOCKS, Holder, PromptPrefixes, holders


def test_prompts_share_the_hashes_of_what_they_have_in_common() -> None:
    """Up to the block in which they differ first, at every depth, whichever of them is asked for first."""
    random = Random(3)
    for _ in range(30):
        one = [random.randrange(200_000) for _ in range(random.randrange(1, (MAX_BLOCKS + 3) * BLOCK_TOKENS))]
        first = random.randrange(len(one))
        other = [*one[:first], one[first] + 1, *one[first + 1 :]]
        ours, theirs = PromptPrefixes(one), PromptPrefixes(other)
        assert ours.num_blocks == theirs.num_blocks == min(len(one) // BLOCK_TOKENS, MAX_BLOCKS)
        depths = [*range(1, ours.num_blocks + 1)]
        random.shuffle(depths)
        assert all((ours.digest(n) == theirs.digest(n)) is (n * BLOCK_TOKENS <= first) for n in depths)
        assert ours.looked_up == [PromptPrefixes(one).digest(n) for n in DEPTHS if n <= ours.num_blocks]


def test_a_salt_and_another_depth_give_another_hash() -> None:
    same = [7] * 4 * BLOCK_TOKENS
    prompts = [PromptPrefixes(same), PromptPrefixes(same, salted("a")), PromptPrefixes(same, salted("b"))]
    digests = {prompt.digest(depth) for prompt in prompts for depth in range(1, 5)}
    assert len(digests) == 12 and {len(digest) for digest in digests} == {16}


@pytest.mark.parametrize(("num_more", "depth"), [(0, 5), (700, 5), (-1, 4)])
def test_a_prompt_that_goes_on_where_a_holders_ended_is_known_to_the_block(num_more: int, depth: int) -> None:
    """Five blocks are between two of the depths that are looked up."""
    tokens = [*range(5 * BLOCK_TOKENS)]
    before = PromptPrefixes(tokens)
    entry = f"12:40:{before.tail}".encode()
    asked = PromptPrefixes([*tokens, *[1] * num_more] if num_more >= 0 else tokens[:num_more])
    found = [entry] * len(asked.looked_up)
    assert asked.looked_up[:4] == before.looked_up[:4]
    assert holders(asked, found, 8) == {"12": Holder(depth, 40, depth == 5)}
