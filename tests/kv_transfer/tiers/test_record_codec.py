"""A compressed record states its level, gives back what was coded, and is refused where anything of it differs."""

import msgspec
import numpy as np
import pytest

from contracts.errors import Corrupt
from contracts.layout import KVGroup, KVLayout
from kv_transfer.chunks.block_record import (
    VerifiedBlock,
    begin_record,
    facts_of,
    max_record_nbytes,
    seal_record,
    verify,
)
from kv_transfer.codecs.level import LEVELS, loss_of
from kv_transfer.tiers.record_codec import LEVELLED, RecordCodec, WriteRate
from tests.kv_transfer.tiers.block_samples import key_of

LAYOUT = KVLayout.uniform(model="m", num_layers=3, num_kv_heads=2, head_dim=32, block_size=16, dtype="float32")
KEY = key_of(1)
VALUES = np.random.default_rng(0).normal(size=LAYOUT.block_nbytes // 4).astype(np.float32)
VALUES.reshape(LAYOUT.only_group.num_planes, -1)[0::2] += 5  # keys lie beside zero
CODEC = RecordCodec(LAYOUT, list(LEVELS))


def sealed(payload: np.ndarray, **changes: object) -> memoryview:
    facts = facts_of(KEY, LAYOUT, raw_nbytes=LAYOUT.block_nbytes, stored_nbytes=len(payload))
    facts = msgspec.structs.replace(facts, **changes)
    buffer = memoryview(bytearray(max_record_nbytes(LAYOUT)))
    begin_record(facts, buffer)[:] = payload
    return seal_record(facts, buffer)


RAW_RECORD = sealed(VALUES.view(np.uint8))


def compressed(level: str) -> memoryview:
    small = CODEC.compress(RAW_RECORD, KEY, level, KEY)
    assert small is not None
    return small


@pytest.mark.parametrize("level", LEVELS)
def test_a_record_comes_back_from_every_level(level: str) -> None:
    small = compressed(level)
    assert len(small) < 0.9 * len(RAW_RECORD)
    block = verify(small, KEY, LAYOUT)
    assert (block.facts.codec, block.facts.level) == (LEVELLED, LEVELS[level].number)
    found = CODEC.read(block, loss_of(level)).view(np.float32)
    if LEVELS[level].is_lossless:
        assert (found == VALUES).all()
    else:
        assert 0 < np.abs(found - VALUES).max() < 0.3


def test_a_raw_record_is_read_as_it_is_and_noise_is_not_compressed() -> None:
    assert (CODEC.read(verify(RAW_RECORD, KEY, LAYOUT)).view(np.float32) == VALUES).all()
    noise = sealed(np.random.default_rng(1).integers(0, 256, LAYOUT.block_nbytes, dtype=np.uint8))
    assert CODEC.compress(noise, KEY, "lossless", KEY) is None


@pytest.mark.parametrize(("loss", "words"), [("", "exact"), ("8bit", "8bit")])
def test_a_level_that_loses_is_read_only_under_a_key_that_says_so(loss: str, words: str) -> None:
    with pytest.raises(Corrupt, match=f"level is '4bit', which loses, under the key of {words} KV"):
        CODEC.read(verify(compressed("4bit"), KEY, LAYOUT), loss)
    lossless = verify(compressed("lossless"), KEY, LAYOUT)
    assert (RecordCodec(LAYOUT, []).read(lossless).view(np.float32) == VALUES).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"raw_checksum": 1}, "raw_checksum differs"),
        ({"codec": "gzip"}, "codec is 'gzip' at level 1"),
        ({"level": 99}, "codec is 'levelled' at level 99"),
    ],
)
def test_what_a_sealed_record_states_wrongly_is_named(changes: dict[str, object], words: str) -> None:
    block = verify(compressed("lossless"), KEY, LAYOUT)
    own = {"codec": LEVELLED, "level": 1, "raw_checksum": block.facts.raw_checksum}
    with pytest.raises(Corrupt, match=words):
        CODEC.read(verify(sealed(block.payload, **own | changes), KEY, LAYOUT))


def test_a_flipped_bit_of_a_payload_that_is_sealed_anew_is_found() -> None:
    block = verify(compressed("4bit"), KEY, LAYOUT)
    payload = block.payload.copy()
    payload[len(payload) // 2] ^= 1
    facts = {"codec": LEVELLED, "level": block.facts.level, "raw_checksum": block.facts.raw_checksum}
    with pytest.raises(Corrupt, match="the checksum of compressed KV differs"):
        CODEC.read(verify(sealed(payload, **facts), KEY, LAYOUT), "4bit")


def test_a_record_gets_the_key_that_it_is_compressed_for() -> None:
    other = key_of(2)
    small = CODEC.compress(RAW_RECORD, KEY, "4bit", other)
    assert small is not None
    assert CODEC.read(verify(small, other, LAYOUT), "4bit").any()
    with pytest.raises(Corrupt, match="key is"):
        verify(small, KEY, LAYOUT)


def test_a_slow_tier_compresses_what_may_lose_something_by_a_level_that_loses() -> None:
    assert CODEC.choose(RAW_RECORD, 1e4, may_lose=True) not in ("", "lossless")
    assert CODEC.choose(RAW_RECORD, 1e4, may_lose=False) == "lossless"
    assert CODEC.choose(RAW_RECORD, 0.0, may_lose=True) == ""
    assert CODEC.choose(RAW_RECORD, 5e9, may_lose=True) == ""
    assert RecordCodec(LAYOUT, []).choose(RAW_RECORD, 1e4, may_lose=True) == ""


def test_the_rate_of_a_tier_is_unknown_at_first_and_then_that_of_its_last_records() -> None:
    rate = WriteRate()
    for _ in range(3):
        rate.add(1000, 10.0)
        assert rate.nbytes_per_s == 0.0
    for _ in range(100):
        rate.add(1000, 0.01)
    assert rate.nbytes_per_s == pytest.approx(1e5, rel=0.05)


def test_latents_are_coded_as_keys_are() -> None:
    """A step is a part of what is left beside the mean of a channel, since latents meet queries."""
    layout = KVLayout.uniform(
        model="m", num_layers=3, num_kv_heads=1, head_dim=48, block_size=16, dtype="float32", is_latent=True
    )
    draw = np.random.default_rng(2)
    values = draw.normal(size=(3, 16, 48)).astype(np.float32) + draw.choice([-5, 5], size=48).astype(np.float32)
    facts = facts_of(KEY, layout, raw_nbytes=layout.block_nbytes, stored_nbytes=layout.block_nbytes)
    buffer = memoryview(bytearray(max_record_nbytes(layout)))
    begin_record(facts, buffer)[:] = values.reshape(-1).view(np.uint8)
    record, codec = seal_record(facts, buffer), RecordCodec(layout, list(LEVELS))
    for level, most in (("lossless", 0.0), ("4bit", 0.2)):
        small = codec.compress(record, KEY, level, KEY)
        assert small is not None and len(small) < len(record)
        found = codec.read(verify(small, KEY, layout), level).view(np.float32).reshape(values.shape)
        assert np.abs(found - values).max() <= most


def test_the_pages_behind_the_models_keep_every_bit() -> None:
    """Those of a head lie behind, and are not coded; a record that ends within them is refused."""
    head = KVGroup(
        kind="draft", layers=(0,), num_kv_heads=1, head_dim=8, block_size=16, dtype="float32", weights="a head"
    )
    layout = msgspec.structs.replace(LAYOUT, groups=(*LAYOUT.groups, head))
    behind = np.random.default_rng(1).integers(0, 256, head.block_nbytes, np.uint8)
    payload = np.concatenate([VALUES.view(np.uint8), behind])
    facts = facts_of(KEY, layout, raw_nbytes=layout.block_nbytes, stored_nbytes=len(payload))
    buffer = memoryview(bytearray(max_record_nbytes(layout)))
    begin_record(facts, buffer)[:] = payload
    codec = RecordCodec(layout, list(LEVELS))
    small = codec.compress(seal_record(facts, buffer), KEY, "4bit", KEY)
    assert small is not None and len(small) < len(buffer)
    block = verify(small, KEY, layout)
    assert np.array_equal(codec.read(block, "4bit")[-len(behind) :], behind)
    cut = VerifiedBlock(block.facts, block.payload[: len(behind) - 1])
    with pytest.raises(Corrupt, match=f"stored_nbytes is {len(behind) - 1}, of which {len(behind)} are not coded"):
        codec.read(cut, "4bit")
