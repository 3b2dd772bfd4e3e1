"""Hashes, layouts and errors: facts that two machines must agree on."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import LayoutMismatch, TandemError, by_code
from contracts.hashing import chain_hashes, salted
from contracts.layout import KVLayout
from contracts.node import TransferCapabilities
from tests.nodes import node_info, ways

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=60)


def layout(**changes) -> KVLayout:
    base = {"model": "m", "num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "block_size": 16, "dtype": "float32"}
    return KVLayout(**(base | changes))


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_hashes_agree_exactly_on_the_shared_full_blocks(one, other, size):
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    first, second = chain_hashes(one, size), chain_hashes(other, size)
    assert len(first) == len(one) // size
    same = [a == b for a, b in zip(first, second, strict=False)]
    assert same == [index < shared // size for index in range(len(same))]


@given(TOKENS, st.integers(1, 8), st.integers(0, 5))
def test_a_chain_can_be_continued_and_cut(tokens, size, limit):
    whole = chain_hashes(tokens, size)
    assert chain_hashes(tokens, size, limit) == whole[:limit]
    half = len(whole) // 2
    if half:
        assert chain_hashes(tokens[half * size :], size, previous=whole[half - 1]) == whole[half:]


def test_hashes_are_the_same_in_every_process():
    """Pinned: a gateway and a worker of different versions must agree on them."""
    expected = hashlib.blake2b(struct.pack("<4i", 0, 1, 2, 3), digest_size=16).hexdigest()
    assert chain_hashes(range(4), 4)[0].hex() == expected == "35ce1b7dc4da8ce51a7591561b3595db"


def test_a_salt_with_the_bytes_of_a_block_does_not_begin_where_that_block_ends():
    token_ids = [104, 105, 33, 10]
    salt = struct.pack("<4i", *token_ids).decode()
    assert salted(salt) != chain_hashes(token_ids, 4)[0]
    assert (salted(""), salted("a").hex()) == (b"", "2660bc5e1336d848d84aca16b9d7879b")


def test_sizes_follow_from_the_layout():
    kv = layout()
    assert (kv.num_planes, kv.page_nbytes, kv.block_nbytes) == (4, 4 * 16 * 8 * 4, 4 * 4 * 16 * 8 * 4)
    assert [kv.num_blocks(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    halves = layout(tp_size=2)
    assert (halves.page_nbytes, halves.shard_nbytes) == (kv.page_nbytes // 2, kv.block_nbytes // 2)
    assert (halves.block_nbytes, kv.shard_nbytes) == (kv.block_nbytes, kv.block_nbytes)


def test_a_worker_takes_the_layouts_it_says():
    source, sink = node_info(layout_id="a"), node_info(layout_id="b", ways=ways("b", "a"))
    assert sink.can_receive_from(source) and source.can_receive_from(source) and not source.can_receive_from(sink)


def test_a_worker_takes_kv_by_the_ways_it_says_of_that_layout_and_memory():
    sink = node_info(
        ways=TransferCapabilities(memory="cuda", sends=["tcp"], takes={"l": ["ucx", "tcp"], "wide": ["ucx"]})
    )
    assert sink.can_receive_from(node_info(ways=ways(by="shm@a ucx", memory="cuda")))
    assert sink.can_receive_from(node_info(layout_id="wide", ways=ways(by="ucx", memory="cuda")))
    assert not sink.can_receive_from(node_info(ways=ways(by="shm@a", memory="cuda")))
    assert not sink.can_receive_from(node_info(layout_id="wide", ways=ways(by="tcp", memory="cuda")))
    assert not sink.can_receive_from(node_info(ways=ways(by="ucx tcp", memory="host")))
    assert not sink.can_receive_from(node_info(ways=ways(by="", memory="cuda")))


@pytest.mark.parametrize("change", [{"model": "n"}, {"block_size": 32}, {"dtype": "bfloat16"}, {"num_kv_heads": 2}])
def test_a_mismatch_names_the_field_and_both_values(change):
    ours, theirs = layout(), layout(**change)
    (field,) = change
    with pytest.raises(LayoutMismatch, match=field) as caught:
        ours.require_match(theirs)
    assert (caught.value.field, caught.value.theirs) == (field, change[field])
    assert ours.layout_id != theirs.layout_id


def test_equal_layouts_match_and_share_an_id():
    layout().require_match(layout())
    assert layout().layout_id == layout().layout_id


def test_an_error_keeps_its_code_across_processes():
    error = by_code("peer_lost", "words")
    assert isinstance(error, TandemError) and (error.code, str(error)) == ("peer_lost", "words")
    assert TandemError("x").code == "internal"
