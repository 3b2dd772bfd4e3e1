"""The codecs of KV: exact or within half a step, and Corrupt for what is not theirs."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ConfigError, Corrupt
from kv_transfer.codecs import codec, entropy
from kv_transfer.codecs.choice import MAX_NBYTES_PER_S, CodecRate, choose_level, transfer_s
from kv_transfer.codecs.level import LEVELS, allowed_levels
from kv_transfer.codecs.numbers import FINITE_MAX, RELATIVE_STEP, SMALLEST_STEP, from_float32, to_float32
from kv_transfer.codecs.page_format import PageFormat, PageRun, runs_of

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
LOSSLESS = LEVELS["lossless"]


def formats() -> st.SearchStrategy[PageFormat]:
    return st.builds(
        PageFormat, st.sampled_from(DTYPES), st.integers(1, 3), st.sampled_from([1, 4, 16]), st.sampled_from([1, 8, 64])
    )


def runs() -> st.SearchStrategy[list[PageRun]]:
    one = st.integers(1, 4).flatmap(lambda n: st.builds(PageRun, st.just(n), st.booleans(), st.integers(0, n)))
    return st.lists(one, min_size=1, max_size=4)


def num_pages(runs: list[PageRun]) -> int:
    return sum(run.num_pages for run in runs)


def random_bytes(runs: list[PageRun], format_: PageFormat, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_pages(runs) * format_.page_nbytes, dtype=np.uint8)


def random_kv(runs: list[PageRun], format_: PageFormat, seed: int) -> np.ndarray:
    """Return values of several sizes about means of their channels."""
    rng = np.random.default_rng(seed)
    shape = num_pages(runs), format_.num_kv_heads, format_.block_size, format_.head_dim
    means = rng.normal(0, 4, (shape[1], 1, shape[3]))
    values = rng.normal(means, np.exp(rng.normal(0, 1, (1, shape[1], 1, 1))), shape).astype(np.float32)
    return from_float32(values.reshape(-1), format_.dtype)


def round_trip(data: np.ndarray, runs: list[PageRun], format_: PageFormat, level: str) -> np.ndarray:
    payload, out = codec.encode(data, runs, format_, LEVELS[level]), np.zeros_like(data)
    assert codec.level_of(memoryview(payload)) == level
    assert codec.decode(memoryview(payload), runs, format_, out) is LEVELS[level]
    return out


@given(formats(), runs(), st.integers(0, 999))
def test_lossless_keeps_every_bit_of_any_bytes(format_: PageFormat, runs: list[PageRun], seed: int) -> None:
    for data in (random_bytes(runs, format_, seed), random_kv(runs, format_, seed)):
        assert (round_trip(data, runs, format_, "lossless") == data).all()


@given(formats(), runs(), st.sampled_from([name for name in LEVELS if name != "lossless"]), st.integers(0, 999))
def test_a_lossy_level_is_off_by_half_a_step_at_most(
    format_: PageFormat, runs: list[PageRun], name: str, seed: int
) -> None:
    data, level = random_kv(runs, format_, seed), LEVELS[name]
    shape = -1, format_.num_kv_heads, format_.block_size, format_.head_dim
    before, after = (
        to_float32(some, format_.dtype).reshape(shape) for some in (data, round_trip(data, runs, format_, name))
    )
    first = 0
    for run in runs:
        kept, end = first + run.num_exact, first + run.num_pages
        assert (before[first:kept] == after[first:kept]).all()
        if kept < end:
            check_error(
                before[kept:end], after[kept:end], run, level.key_step if run.is_key else level.value_step, format_
            )
        first = end


def check_error(before: np.ndarray, after: np.ndarray, run: PageRun, share: float | None, format_: PageFormat) -> None:
    means = before.mean(axis=(0, 2), keepdims=True).astype(np.float16).astype(np.float32) if run.is_key else 0.0
    centred = before - means
    step = np.maximum(
        np.abs(centred).max(axis=(0, 2, 3), keepdims=True) / 127,
        (share or 0.0) * centred.std(axis=(0, 2, 3), keepdims=True),
    )
    rounding = np.maximum(np.abs(after) * RELATIVE_STEP[format_.dtype], SMALLEST_STEP[format_.dtype])
    slack = 1e-5 * (np.abs(before).max() + 1)
    assert (np.abs(before - after) <= step / 2 + rounding / 2 + slack).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_any_bit_pattern_comes_through_every_level(dtype: str, level: str) -> None:
    """A run with NaN, infinities or values that no step fits is kept bit for bit."""
    format_, runs = PageFormat(dtype, 2, 4, 8), [PageRun(2, True, 1), PageRun(2, False)]
    data = random_bytes(runs, format_, 1)
    out = round_trip(data, runs, format_, level)
    values = to_float32(data, dtype).reshape(2, -1)
    for run in range(2):
        if not np.isfinite(values[run]).all():
            assert (out.reshape(2, -1)[run] == data.reshape(2, -1)[run]).all()


@pytest.mark.parametrize("fill", [0.0, 1.0, -3e38, 65504.0, 1e-40])
@pytest.mark.parametrize("level", LEVELS)
def test_constant_values_come_back(fill: float, level: str) -> None:
    format_, runs = PageFormat("float32", 2, 4, 8), [PageRun(3, True), PageRun(3, False)]
    data = np.full(6 * format_.num_items, fill, dtype=np.float32).view(np.uint8)
    out = round_trip(data, runs, format_, level).view(np.float32)
    np.testing.assert_allclose(out, np.float32(fill), rtol=0.005, atol=1e-29)


def test_steps_that_hold_the_most_make_fewer_bits_each_level_down() -> None:
    format_, runs = PageFormat("float32", 3, 16, 64), [PageRun(16, True), PageRun(16, False)]
    data = random_kv(runs, format_, 3)
    sizes = [len(codec.encode(data, runs, format_, level)) for level in LEVELS.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] * 8 / (data.nbytes / 4) < 3.3
    assert data.nbytes / sizes[0] > 1.15


def test_pages_encoded_alone_or_together_are_decoded_alike() -> None:
    """A payload needs no other: what one says does not depend on what was coded before."""
    format_, run = PageFormat("bfloat16", 2, 16, 32), PageRun(2, True)
    data = random_kv([run, run], format_, 4)
    alone = [codec.encode(half, [run], format_, LEVELS["4bit"]) for half in np.split(data, 2)]
    again = [codec.encode(half, [run], format_, LEVELS["4bit"]) for half in reversed(np.split(data, 2))]
    assert alone == again[::-1]


@pytest.mark.parametrize("level", LEVELS)
def test_every_flipped_bit_is_corrupt(level: str) -> None:
    format_, runs = PageFormat("bfloat16", 1, 4, 8), [PageRun(2, True, 1), PageRun(2, False)]
    payload = codec.encode(random_kv(runs, format_, 5), runs, format_, LEVELS[level])
    out = np.zeros(4 * format_.page_nbytes, dtype=np.uint8)
    for position in range(8 * len(payload)):
        flipped = bytearray(payload)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(Corrupt):
            codec.decode(memoryview(flipped), runs, format_, out)


@pytest.mark.parametrize("level", LEVELS)
def test_every_cut_payload_and_one_too_long_is_corrupt(level: str) -> None:
    format_, runs = PageFormat("float32", 1, 4, 8), [PageRun(2, True, 1), PageRun(1, False)]
    payload = codec.encode(random_kv(runs, format_, 6), runs, format_, LEVELS[level])
    out = np.zeros(3 * format_.page_nbytes, dtype=np.uint8)
    for size in range(len(payload)):
        with pytest.raises(Corrupt):
            codec.decode(memoryview(payload)[:size], runs, format_, out)
    with pytest.raises(Corrupt):
        codec.decode(memoryview(payload + b"\0"), runs, format_, out)


@given(formats(), runs(), st.sampled_from(list(LEVELS)), st.integers(0, 999), st.data())
def test_what_a_liar_signs_is_corrupt_or_fills_the_pages(
    format_: PageFormat, runs: list[PageRun], level: str, seed: int, data: st.DataObject
) -> None:
    """A payload with a right checksum may say anything: it never reads or writes outside its pages."""
    payload = bytearray(codec.encode(random_kv(runs, format_, seed), runs, format_, LEVELS[level]))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(1, len(payload) - 1))
        payload[place] = data.draw(st.integers(0, 255))
    cut = payload[: data.draw(st.integers(codec.HEAD_NBYTES, len(payload)))]
    cut[12:20] = codec._checksum(bytes(cut[:12]), bytes(cut[20:])).to_bytes(8, "little")
    guarded = np.full(num_pages(runs) * format_.page_nbytes + 64, 7, dtype=np.uint8)
    with contextlib.suppress(Corrupt):
        codec.decode(memoryview(cut), runs, format_, guarded[32:-32])
    assert (guarded[:32] == 7).all()
    assert (guarded[-32:] == 7).all()


def test_a_code_of_more_symbols_than_pages_have_is_not_expanded() -> None:
    bomb = entropy.compress(np.zeros(1 << 24, dtype=np.uint8))
    assert len(bomb) < 1 << 16
    with pytest.raises(Corrupt, match="100 symbols"):
        entropy.expand(memoryview(bomb), 100)


def test_payload_of_another_format_or_of_other_runs_is_corrupt() -> None:
    format_, runs = PageFormat("float32", 2, 4, 8), [PageRun(2, True)]
    payload = memoryview(codec.encode(random_kv(runs, format_, 7), runs, format_, LEVELS["8bit"]))
    out = np.zeros(2 * format_.page_nbytes, dtype=np.uint8)
    with pytest.raises(Corrupt, match="dtype"):
        codec.decode(payload, runs, PageFormat("bfloat16", 2, 4, 16), out)
    with pytest.raises(Corrupt):
        codec.decode(payload, [PageRun(2, False)], format_, out)
    with pytest.raises(ValueError, match="runs of pages"):
        codec.decode(payload, [PageRun(3, True)], format_, out)


def test_e4m3_rounds_to_nearest_even_and_holds_at_its_largest() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = to_float32(codes, "float8_e4m3fn")
    finite = np.isfinite(values)
    assert (from_float32(values[finite], "float8_e4m3fn") == codes[finite]).all()
    assert np.isnan(values[~finite]).all()
    tie = np.array([17.0, 19.0, 1e9, -1e9, 2.0**-10], dtype=np.float32)
    assert to_float32(from_float32(tie, "float8_e4m3fn"), "float8_e4m3fn").tolist() == [16.0, 20.0, 448.0, -448.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_come_back_from_float32(dtype: str) -> None:
    data = random_bytes([PageRun(64, True)], PageFormat(dtype, 1, 8, 8), 8)
    values = to_float32(data, dtype)
    item_nbytes = data.size // values.size
    finite = np.isfinite(values)
    assert (from_float32(values[finite], dtype) == data.reshape(-1, item_nbytes)[finite].reshape(-1)).all()
    assert np.abs(to_float32(from_float32(np.array([3e38], dtype=np.float32), dtype), dtype))[0] <= FINITE_MAX[dtype]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.data())
def test_runs_cover_a_message_plane_by_plane(pages: int, planes: int, num_exact: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, pages * planes - 1))
    last = data.draw(st.integers(first + 1, pages * planes))
    is_key = [plane % 2 == 0 for plane in range(planes)]
    found = []
    for run in runs_of(first, last, pages, is_key, num_exact):
        found += [(run.is_key, page < run.num_exact) for page in range(run.num_pages)]
    assert found == [(is_key[row // pages], row % pages < num_exact) for row in range(first, last)]


def test_allowed_levels_are_never_lossy_unless_named() -> None:
    assert allowed_levels("auto") == ["lossless"]
    assert allowed_levels("off") == []
    assert allowed_levels("4bit") == ["lossless", "4bit"]
    with pytest.raises(ConfigError, match="kv_codec is 'zip'; it must be one of auto, off, lossless"):
        allowed_levels("zip")


RATES = {"lossless": CodecRate(1.2, 5e8, 5e8), "4bit": CodecRate(8.0, 4e8, 6e8)}


def test_a_slow_link_takes_the_level_that_saves_most_and_a_fast_one_none() -> None:
    def choose(bandwidth: float, *allowed: str) -> str:
        return choose_level(100 << 20, 1 << 20, bandwidth, RATES, allowed)

    assert choose(12.5e6, "lossless", "4bit") == "4bit"
    assert choose(12.5e6, "lossless") == "lossless"
    assert choose(12.5e6) == ""
    assert choose(600e6, "lossless") == ""
    assert choose(5e9, "lossless", "4bit") == ""
    assert choose(0.0, "lossless", "4bit") == ""


@given(st.floats(1e5, 1e11), st.integers(1, 1 << 30), st.integers(1, 1 << 20))
def test_what_is_chosen_is_never_slower_than_raw_bytes(bandwidth: float, nbytes: int, message: int) -> None:
    name = choose_level(nbytes, message, bandwidth, RATES, list(RATES))
    if name:
        assert transfer_s(nbytes, message, bandwidth, RATES[name]) < nbytes / bandwidth
    elif bandwidth < MAX_NBYTES_PER_S:
        assert all(transfer_s(nbytes, message, bandwidth, rate) >= nbytes / bandwidth for rate in RATES.values())


def test_one_message_is_compressed_by_the_rule_for_bytes_saved() -> None:
    for bandwidth in np.geomspace(1e6, 9e8, 40):
        rate, nbytes = RATES["lossless"], 1 << 20
        pays = nbytes * (1 - 1 / rate.ratio) / bandwidth > nbytes * (
            1 / rate.encode_nbytes_per_s + 1 / rate.decode_nbytes_per_s
        )
        assert (choose_level(nbytes, 1 << 20, bandwidth, RATES, ["lossless"]) == "lossless") == pays
