import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ConfigError, Corrupt
from contracts.handoff import ChunkHeader
from contracts.ids import Epoch, RequestId
from kv_transfer.chunks import checksum as integrity
from kv_transfer.chunks import chunk_plan as plan
from kv_transfer.chunks.page_pool import PagePool
from kv_transfer.chunks.wire_format import META_NBYTES, KVSegment, read_meta, write_meta
from kv_transfer.settings import TransferSettings
from tests.kv_transfer.kv_pair import LAYOUT


@given(st.integers(0, 500), st.integers(1, 64))
def test_messages_cover_a_chunk_once_and_fit(num_rows: int, rows_per_message: int) -> None:
    spans = list(plan.split(num_rows, rows_per_message))
    assert [row for span in spans for row in range(span.first, span.last)] == list(range(num_rows))
    assert all(0 < span.last - span.first <= rows_per_message for span in spans)


@given(st.permutations(range(12)), st.integers(1, 12))
def test_gather_then_scatter_moves_pages_plane_by_plane(order: list[int], num_pages: int) -> None:
    shape = (LAYOUT.only_group.num_planes, 12, LAYOUT.only_group.page_nbytes(1))
    pages = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    pool, chosen = PagePool(pages, LAYOUT), order[:num_pages]
    staging = np.empty(num_pages * LAYOUT.block_nbytes, dtype=np.uint8)
    pool.gather(plan.row_ids(chosen, LAYOUT.only_group.num_planes, 12), staging)
    assert (staging.reshape(LAYOUT.only_group.num_planes, num_pages, -1) == pages[:, chosen]).all()
    landed = np.zeros(shape, dtype=np.uint8)
    PagePool(landed, LAYOUT).scatter(plan.row_ids(chosen[::-1], LAYOUT.only_group.num_planes, 12), staging)
    assert (landed[:, chosen[::-1]] == pages[:, chosen]).all()
    assert landed.any(axis=(0, 2)).sum() == num_pages


@pytest.mark.parametrize("pages", [[-1], [12], [3, 3]])
def test_pages_outside_the_pool_or_twice_are_refused(pages: list[int]) -> None:
    with pytest.raises(ValueError):
        plan.check_pages(pages, 12)


@pytest.mark.parametrize("shape", [(6, 4, 255), (5, 4, 256), (6, 256)])
def test_a_pool_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        PagePool(np.zeros(shape, dtype=np.uint8), LAYOUT)


@given(st.binary(min_size=2, max_size=300), st.data())
def test_the_checksum_sees_one_byte_order_and_epoch(data: bytes, choice: st.DataObject) -> None:
    bytes_in = np.frombuffer(data, dtype=np.uint8)
    at = choice.draw(st.integers(0, len(data) - 1))
    changed = bytes_in.copy()
    changed[at] ^= 1
    seed = integrity.seed(Epoch(3))
    assert integrity.extend(seed, bytes_in) != integrity.extend(seed, changed)
    assert integrity.extend(seed, bytes_in) != integrity.extend(integrity.seed(Epoch(4)), bytes_in)


def test_the_checksum_sees_messages_swapped() -> None:
    one, two = np.full(64, 1, dtype=np.uint8), np.full(64, 2, dtype=np.uint8)
    seed = integrity.seed(Epoch(1))
    assert integrity.extend(integrity.extend(seed, one), two) != integrity.extend(integrity.extend(seed, two), one)


def _piece(request_id: str) -> KVSegment:
    return KVSegment(ChunkHeader(RequestId(request_id), Epoch(1), 0, 0, 4, "id", 100, 2**64 - 1), 0, 100)


def test_the_words_before_a_piece_come_back() -> None:
    meta = np.zeros(META_NBYTES, dtype=np.uint8)
    write_meta(_piece("r1"), meta)
    assert read_meta(meta) == _piece("r1")


def test_ids_that_do_not_fit_are_refused_when_written() -> None:
    with pytest.raises(ValueError, match="request_id"):
        write_meta(_piece("r" * META_NBYTES), np.zeros(META_NBYTES, dtype=np.uint8))


@given(st.binary(min_size=META_NBYTES, max_size=META_NBYTES))
def test_noise_before_a_piece_is_corrupt_and_nothing_else(noise: bytes) -> None:
    try:
        read_meta(np.frombuffer(noise, dtype=np.uint8))
    except Corrupt:
        return


def test_a_head_with_letters_that_are_none_is_corrupt() -> None:
    meta = np.zeros(META_NBYTES, dtype=np.uint8)
    write_meta(_piece("r1"), meta)
    meta[meta.tobytes().index(b"r1")] = 0xFF
    with pytest.raises(Corrupt):
        read_meta(meta)


@pytest.mark.parametrize("options", [{"transport": "pigeon"}, {"secret": b""}, {"num_slots": 0}, {"heartbeat_s": 0}])
def test_settings_that_cannot_work_name_the_field(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        TransferSettings(**{"secret": b"x", **options})
