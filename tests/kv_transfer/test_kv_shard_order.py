"""A block's bytes have one order for stores and peers, into which those of any number of shards go and come back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.layout import KVGroup
from kv_transfer.chunks.chunk_plan import row_ids
from kv_transfer.chunks.shard_order import join_parts, join_shards, split_parts, split_shards

GROUP = KVGroup(layers=(0, 1, 2), num_kv_heads=4, head_dim=8, block_size=4, dtype="bfloat16")
NUM_BLOCKS = 9
SIZES = st.sampled_from([1, 2, 4])


def whole_pages(seed: int, num_blocks: int = NUM_BLOCKS) -> np.ndarray:
    """Return random pages of a cache with one shard."""
    shape = (GROUP.num_planes, num_blocks, GROUP.page_nbytes(1))
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@given(st.integers(0, 2**32), SIZES, SIZES)
def test_shards_of_one_number_become_those_of_another(seed: int, tp_size: int, other: int) -> None:
    pages = whole_pages(seed)
    there = [shard.copy() for shard in split_shards(pages, tp_size)]
    assert there[0].shape == (GROUP.num_planes, NUM_BLOCKS, GROUP.page_nbytes(tp_size))
    beyond = split_shards(join_shards(there), other)
    assert np.array_equal(join_shards(beyond), pages)
    back = split_shards(join_shards(beyond), tp_size)
    assert all(np.array_equal(one, two) for one, two in zip(there, back, strict=True))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_shard_holds_its_heads(tp_size: int) -> None:
    """Compared with the heads themselves: `[planes, blocks, heads, block, head_dim]` of two bytes."""
    heads = np.arange(GROUP.num_kv_heads, dtype=np.uint8)
    shape = (GROUP.num_planes, NUM_BLOCKS, GROUP.num_kv_heads, 2 * GROUP.block_size * GROUP.head_dim)
    pages = np.broadcast_to(heads[:, None], shape).reshape(GROUP.num_planes, NUM_BLOCKS, -1)
    for number, shard in enumerate(split_shards(pages, tp_size)):
        size = GROUP.num_kv_heads // tp_size
        assert set(shard.ravel()) == set(range(number * size, (number + 1) * size))


@given(st.integers(0, 2**32), SIZES, st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, unique=True))
def test_a_chunk_in_parts_becomes_whole_pages_and_a_chunk_again(seed: int, num_parts: int, blocks: list[int]) -> None:
    pages = whole_pages(seed)
    shards = np.stack(split_shards(pages, num_parts)).reshape(-1, GROUP.page_nbytes(num_parts))
    chunk = shards[row_ids(blocks, num_parts * GROUP.num_planes, NUM_BLOCKS)].reshape(-1)
    whole = join_parts(chunk, num_parts, GROUP.num_planes, len(blocks))
    assert np.array_equal(whole, pages[:, blocks])
    assert np.array_equal(split_parts(whole, num_parts), chunk)


def test_what_cannot_be_cut_is_refused() -> None:
    pages = whole_pages(1)
    with pytest.raises(ValueError, match="into 3 shards"):
        split_shards(pages, 3)
    with pytest.raises(ValueError, match="into 3 parts"):
        split_parts(pages, 3)
    with pytest.raises(ValueError, match="one shape"):
        join_shards([pages, pages[:, :2]])
    with pytest.raises(ValueError, match="reshape"):
        join_parts(pages.reshape(-1)[:-1], 2, GROUP.num_planes, NUM_BLOCKS)
