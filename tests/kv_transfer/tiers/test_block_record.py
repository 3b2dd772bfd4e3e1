"""The stored form of a block: nothing but the block that was asked for, to the last bit, is believed."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import Corrupt, LayoutMismatch
from contracts.layout import KVLayout
from kv_transfer.chunks.block_record import begin_record, facts_of, max_record_nbytes, seal_record, verify
from tests.kv_transfer.tiers.block_samples import LAYOUT, RECORD_NBYTES, bytes_of, key_of, record_of

WHOLE = bytes(record_of(1))


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
    with pytest.raises(Corrupt, match="version is 3, expected 2"):
        verify(memoryview(record), key_of(1), LAYOUT)


def test_no_record_is_larger_than_the_largest():
    layout: KVLayout = msgspec.structs.replace(LAYOUT, model="x" * 80)
    assert len(record_of(1, layout)) <= max_record_nbytes(layout)
    with pytest.raises(ValueError, match="does not fit"):
        begin_record(facts_of(key_of(1), layout, raw_nbytes=64, stored_nbytes=64), memoryview(bytearray(100)))
