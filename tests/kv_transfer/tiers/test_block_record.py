"""The stored form of a block: nothing but the block that was asked for, to the last bit, is believed."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import Corrupt, LayoutMismatch
from contracts.layout import KVLayout
from kernels.reference.move import STRIDE, checksums
from kernels.specs import MoveSpec
from kv_transfer.chunks.block_record import (
    VERSION,
    begin_record,
    facts_of,
    max_record_nbytes,
    read_stated,
    seal_record,
    summed_payload_offset,
    verify,
)
from kv_transfer.chunks.page_sums import page_sums
from tests.kv_transfer.tiers.block_samples import (
    LAYOUT,
    RECORD_NBYTES,
    bytes_of,
    key_of,
    record_of,
    summed_record_of,
)

WHOLE = bytes(record_of(1))
SUMMED = bytes(summed_record_of(1))


def test_returns_what_was_stored():
    block = verify(record_of(1), key_of(1), LAYOUT)
    assert np.array_equal(block.payload, bytes_of(1))
    assert (block.facts.codec, block.facts.num_tokens) == ("raw", 4)


@given(st.integers(0, len(WHOLE) * 8 - 1))
def test_refuses_every_flipped_bit(bit: int):
    record = bytearray(WHOLE)
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        verify(memoryview(record), key_of(1), LAYOUT)


def test_a_record_with_the_sums_of_its_pages_holds_the_same_block():
    block = verify(summed_record_of(1), key_of(1), LAYOUT)
    assert np.array_equal(block.payload, bytes_of(1))
    stated = read_stated(summed_record_of(1), key_of(1), LAYOUT)
    assert stated.sums is not None and stated.sums.shape == (LAYOUT.only_group.num_planes,)
    assert len(SUMMED) - LAYOUT.block_nbytes == summed_payload_offset(key_of(2), LAYOUT)


@given(st.integers(0, len(SUMMED) * 8 - 1))
def test_refuses_every_flipped_bit_of_a_record_with_sums(bit: int):
    record = bytearray(SUMMED)
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        verify(memoryview(record), key_of(1), LAYOUT)
    if bit // 8 < len(SUMMED) - LAYOUT.block_nbytes:  # what the device does not sum up is refused before it
        with pytest.raises(Corrupt):
            read_stated(memoryview(record), key_of(1), LAYOUT)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"plane_sums": bytes(4)}, "plane_sums is 4, expected 16"), ({"codec": "levelled"}, "codec is 'levelled'")],
)
def test_refuses_sums_that_are_not_of_the_pages_of_a_raw_block(changes: dict, words: str):
    size = LAYOUT.block_nbytes
    facts = facts_of(key_of(1), LAYOUT, raw_nbytes=size, stored_nbytes=size, plane_sums=bytes(16))
    facts = msgspec.structs.replace(facts, **changes)
    buffer = memoryview(bytearray(RECORD_NBYTES))
    begin_record(facts, buffer)[:] = bytes_of(1)
    with pytest.raises(Corrupt, match=words):
        read_stated(seal_record(facts, buffer), key_of(1), LAYOUT)


@pytest.mark.parametrize("page_nbytes", [4, 64, 4 * 3 * 32, 65536, 3 * 65536])
def test_the_sums_of_pages_are_those_of_a_device(page_nbytes: int):
    pages = np.random.default_rng(page_nbytes).integers(0, 256, (5, page_nbytes), dtype=np.uint8)
    spec, kernel = MoveSpec(1, page_nbytes), torch.from_numpy(pages)
    found = checksums(spec, kernel, 5, 0).numpy().view(np.uint32)
    assert np.array_equal(page_sums(pages), found ^ np.arange(5, dtype=np.uint32) * np.uint32(STRIDE))
    with pytest.raises(ValueError, match="3 bytes"):
        page_sums(pages[:, :3])


def test_refuses_letters_that_are_none():
    record = bytearray(WHOLE)
    place = record.index(b"num_kv_heads")
    record[place] = 0xFF  # no letter in UTF-8, which the decoder reports by another error than all else
    with pytest.raises(Corrupt, match="facts"):
        verify(memoryview(record), key_of(1), LAYOUT)


@given(st.integers(0, len(WHOLE) - 1))
def test_refuses_a_torn_record(nbytes: int):
    with pytest.raises(Corrupt):
        verify(memoryview(WHOLE[:nbytes]), key_of(1), LAYOUT)


@given(st.integers(0, len(WHOLE) - 1))
def test_refuses_a_record_whose_rest_was_never_written(nbytes: int):
    torn = WHOLE[:nbytes].ljust(len(WHOLE), b"\0")
    if torn != WHOLE:  # the last bytes may be zeros anyway
        with pytest.raises(Corrupt):
            verify(memoryview(torn), key_of(1), LAYOUT)


@given(st.binary(max_size=200))
def test_refuses_what_is_no_record(data: bytes):
    with pytest.raises(Corrupt):
        verify(memoryview(data), key_of(1), LAYOUT)


def test_refuses_the_record_of_another_key():
    with pytest.raises(Corrupt, match="key is"):
        verify(record_of(2), key_of(1), LAYOUT)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model", msgspec.structs.replace(LAYOUT, model="other")),
        ("block_size", msgspec.structs.replace(LAYOUT, block_size=8)),
        ("groups[0].layers", LAYOUT.with_groups(layers=(0, 1, 2))),
        ("groups[0].planes", LAYOUT.with_groups(planes=("v", "k"))),
        ("groups[0].num_kv_heads", LAYOUT.with_groups(num_kv_heads=4)),
        ("groups[0].head_dim", LAYOUT.with_groups(head_dim=16)),
        ("groups[0].dtype", LAYOUT.with_groups(dtype="bfloat16")),
        ("groups[0].scales", LAYOUT.with_groups(scales="page")),
    ],
)
def test_names_the_field_in_which_a_layout_differs(field: str, other: KVLayout):
    with pytest.raises(LayoutMismatch) as refused:
        verify(record_of(1, other), key_of(1), LAYOUT)
    assert refused.value.field == field


def test_is_the_same_for_every_number_of_shards():
    sharded = msgspec.structs.replace(LAYOUT, tp_size=2)
    assert bytes(record_of(1, sharded)) == WHOLE
    verify(record_of(1), key_of(1), sharded)


@pytest.mark.parametrize(("field", "value"), [("group", 1), ("num_tokens", 3), ("raw_nbytes", 8)])
def test_names_any_other_field_that_differs(field: str, value: int):
    facts = facts_of(key_of(1), LAYOUT, raw_nbytes=LAYOUT.block_nbytes, stored_nbytes=LAYOUT.block_nbytes)
    facts = msgspec.structs.replace(facts, **{field: value})
    buffer = memoryview(bytearray(RECORD_NBYTES))
    begin_record(facts, buffer)[:] = bytes_of(1)
    with pytest.raises(Corrupt, match=f"{field} is {value}"):
        verify(seal_record(facts, buffer), key_of(1), LAYOUT)


def test_refuses_another_version_by_name():
    record = bytearray(WHOLE)
    record[4] += 1
    with pytest.raises(Corrupt, match=f"version is {VERSION + 1}, expected {VERSION}"):
        verify(memoryview(record), key_of(1), LAYOUT)


def test_no_record_is_larger_than_the_largest():
    layout: KVLayout = msgspec.structs.replace(LAYOUT, model="x" * 80)
    assert len(record_of(1, layout)) <= max_record_nbytes(layout)
    with pytest.raises(ValueError, match="does not fit"):
        begin_record(facts_of(key_of(1), layout, raw_nbytes=64, stored_nbytes=64), memoryview(bytearray(100)))
