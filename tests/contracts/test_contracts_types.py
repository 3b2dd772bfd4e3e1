"""Hashes, layouts and errors: facts that two machines must agree on."""

import hashlib
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import DecodeError, structs

from contracts.codec import decoder, encode
from contracts.errors import ConfigError, LayoutMismatch, TandemError, by_code
from contracts.hashing import block_key, chain_hashes, salted
from contracts.layout import KVGroup, KVLayout
from contracts.node import TransferCapabilities
from tests.nodes import node_info, ways

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=60)


def layout(**changes) -> KVLayout:
    base = {"model": "m", "num_layers": 2, "num_kv_heads": 4, "head_dim": 8, "block_size": 16, "dtype": "float32"}
    return KVLayout.uniform(**(base | changes))


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


def test_an_adapter_and_a_salt_begin_a_chain_of_their_own():
    starts = [salted(salt, adapter) for salt in ("", "a", "ba") for adapter in (b"", b"b", b"ab", b"a")]
    assert len(set(starts)) == len(starts) and salted("", b"") == b""
    assert salted("", b"x" * 16).hex() == "4bd347cb70e833f8ce9a1d8389d401d6"


def test_a_key_is_the_same_in_every_process():
    """Pinned: a store outlives the version that filled it."""
    assert layout().shared_id.hex() == "4702581ae93b44b2f1e0e35b752baa8f"
    assert block_key(layout().shared_id, chain_hashes(range(4), 4)[0]).hex() == "c70dde6b4fefd358d27cea2e3ef833af"


def test_a_key_differs_with_anything_that_decides_a_block():
    others = (layout(model="n"), layout(block_size=32), layout(scales="page"), layout().with_groups(planes=("v", "k")))
    others = (*others, layout(rounding="int4"), layout(rounding="float32"))
    chains = (b"", salted("salt"), salted("", b"adapter"), chain_hashes(range(16), 16)[0])
    layouts = (layout(), two_groups(), two_groups(dtype="float32"), two_groups(weights="x"), *others)
    blocks = [chain_hashes(range(100, 132), 16, previous=chain)[-1] for chain in chains]
    keys = {block_key(kv.shared_id, block, group) for kv in layouts for block in blocks for group in range(2)}
    assert len(keys) == 2 * len(layouts) * len(blocks)


def test_workers_with_other_numbers_of_shards_share_keys():
    assert layout(tp_size=4).shared_id == layout().shared_id and layout(tp_size=4).layout_id != layout().layout_id


def test_sizes_follow_from_the_layout():
    kv = layout()
    group = kv.only_group
    assert (group.num_planes, group.page_nbytes(1), kv.block_nbytes) == (4, 4 * 16 * 8 * 4, 4 * 4 * 16 * 8 * 4)
    assert [kv.num_blocks(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    halves = layout(tp_size=2)
    assert (group.page_nbytes(2), halves.shard_nbytes) == (group.page_nbytes(1) // 2, kv.block_nbytes // 2)
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


DRAFT = KVGroup(kind="draft", layers=(2,), num_kv_heads=2, head_dim=4, block_size=8, dtype="bfloat16")


def two_groups(**changes) -> KVLayout:
    """Return a layout with a draft head's layer, in which these fields of that group are changed."""
    whole = layout()
    return structs.replace(whole, groups=(*whole.groups, structs.replace(DRAFT, **changes)))


def test_the_sizes_of_a_layout_are_those_of_its_groups():
    kv = structs.replace(two_groups(), tp_size=2)
    target, draft = kv.groups
    assert (draft.num_planes, draft.page_nbytes(2), draft.block_nbytes) == (2, 8 * 4 * 2, 2 * 2 * 8 * 4 * 2)
    assert kv.block_nbytes == target.block_nbytes + 2 * draft.block_nbytes == 2 * kv.shard_nbytes
    assert [draft.num_blocks(n) for n in (0, 8, 9, 17)] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="full, draft"):
        kv.only_group  # noqa: B018 - the access is what fails


def test_a_latent_is_one_row_a_token():
    latent = layout(num_kv_heads=1, head_dim=20, is_latent=True)
    group = latent.only_group
    assert (group.kind, group.planes, group.are_keys) == ("latent", ("latent",), (True,))
    assert (group.num_planes, group.page_nbytes(1), latent.block_nbytes) == (2, 16 * 20 * 4, 2 * 16 * 20 * 4)
    assert latent.first_needed(0, 100) == 0 and not group.is_short
    assert latent.difference(layout(num_kv_heads=1, head_dim=20)) == ("groups[0].kind", "latent", "full")


@pytest.mark.parametrize("groups", [(), (structs.replace(DRAFT, block_size=5),)])
def test_a_layout_without_groups_or_with_blocks_that_do_not_fit_is_refused(groups):
    bad = {"model": "m", "block_size": 16, "groups": groups}
    with pytest.raises(ValueError, match=r"needs a group|groups\[0\].block_size is 5"):
        KVLayout(**bad)
    with pytest.raises(DecodeError, match=r"needs a group|groups\[0\].block_size is 5"):
        decoder(KVLayout).decode(encode(bad))


@pytest.mark.parametrize(
    ("theirs", "field", "value"),
    [
        (layout(model="n"), "model", "n"),
        (layout(block_size=32), "block_size", 32),
        (layout(dtype="bfloat16"), "groups[0].dtype", "bfloat16"),
        (layout(num_kv_heads=2), "groups[0].num_kv_heads", 2),
        (layout(scales="page"), "groups[0].scales", "page"),
        (layout(num_layers=1), "groups[0].layers", (0,)),
        (layout().with_groups(planes=("v", "k")), "groups[0].planes", ("v", "k")),
        (layout(tp_size=2), "tp_size", 2),
        (two_groups(), "groups", ["full", "draft"]),
    ],
)
def test_a_mismatch_names_the_field_and_both_values(theirs, field, value):
    ours = layout()
    with pytest.raises(LayoutMismatch, match=re.escape(f"'{field}'")) as caught:
        ours.require_match(theirs)
    assert (caught.value.field, caught.value.theirs) == (field, value)
    assert ours.layout_id != theirs.layout_id


def test_equal_layouts_match_and_share_an_id():
    layout().require_match(layout())
    assert layout().layout_id == layout().layout_id


def test_a_mismatch_in_a_later_group_names_that_group():
    assert two_groups().difference(two_groups(head_dim=8)) == ("groups[1].head_dim", 4, 8)
    assert two_groups().difference(two_groups()) is None


def test_a_group_of_rows_keeps_one_row_for_a_block():
    row = structs.replace(DRAFT, kind="draft_row", planes=("row",), num_kv_heads=1, head_dim=9)
    assert (row.rows, row.page_nbytes(1), row.block_nbytes) == (1, 18, 18)
    assert (DRAFT.rows, row.num_blocks(17)) == (8, 3)


def test_two_that_round_otherwise_hand_over_and_share_nothing():
    ours, theirs = layout(rounding="float32"), layout(rounding="int4")
    assert ours.difference(theirs) is None and ours.model_part == theirs.model_part == layout()
    assert ours.shared_id != theirs.shared_id and ours.layout_id != theirs.layout_id


def test_the_models_part_is_the_layout_without_groups_of_other_weights():
    whole = two_groups(weights="a head")
    assert whole.model_part == layout() != whole
    assert two_groups().model_part == two_groups(), "a group without weights of its own is the model's"
    whole.model_part.require_match(two_groups(weights="another").model_part)
    assert len({kv.shared_id for kv in (layout(), whole, two_groups(weights="another"))}) == 3
    with pytest.raises(ValueError, match="groups have weights of their own before the model's"):
        structs.replace(whole, groups=whole.groups[::-1])


def test_workers_can_exchange_kv_whatever_draft_head_each_has():
    with_head, plain = two_groups(weights="a head"), layout()
    takes = ways(plain.layout_id)
    ends = [node_info(layout=kv, layout_id=kv.layout_id, ways=takes) for kv in (with_head, plain)]
    assert all(sink.can_receive_from(source) for sink in ends for source in ends)
    narrow = layout(dtype="bfloat16")
    assert not ends[0].can_receive_from(node_info(layout=narrow, layout_id=narrow.layout_id, ways=takes))


def test_an_error_keeps_its_code_across_processes():
    error = by_code("peer_lost", "words")
    assert isinstance(error, TandemError) and (error.code, str(error)) == ("peer_lost", "words")
    assert TandemError("x").code == "internal"
