"""The checksum of a page, joined from those of its parts, is that of the page in one piece."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cuda.kv.page_checksums import DeviceChecksums
from engine.cuda.kv.part_sums import part_sums
from engine.cuda.kv.resharding import cut
from kernels.reference.move import kv_sums
from kernels.specs import MoveSpec
from kv_transfer.chunks.page_sums import page_sums

SHAPES = [
    (16384, 1),
    (65536, 2),
    (65536, 4),
    (131072, 4),
    (65536, 8),
    (24576, 2),
    (12 * 8192, 2),
    (3 * 16384, 3),
    (64, 4),
]
"""Bytes of a page, and shards: whole rows of columns, pieces of a row, and pages of three times a power of two."""


@pytest.mark.parametrize(("page_nbytes", "num_shards"), SHAPES)
def test_sums_of_parts_make_up_that_of_the_page(page_nbytes: int, num_shards: int) -> None:
    num_planes, num_blocks = 2, 3
    whole = np.random.default_rng(page_nbytes).integers(0, 256, (num_planes, num_blocks, page_nbytes), dtype=np.uint8)
    shards = [torch.from_numpy(np.ascontiguousarray(each)) for each in np.split(whole, num_shards, axis=-1)]
    parts = part_sums(page_nbytes, num_shards)
    pieces = cut(shards, len(parts.first_columns))
    spec = MoveSpec(num_planes, pieces[0].width, checksum=True)
    operations = [
        partial(kv_sums, spec, piece.planes, offset=piece.offset, first=first)
        for piece, first in zip(pieces, parts.first_columns, strict=True)
    ]
    checksums = DeviceChecksums([operations], num_planes, num_blocks, torch.device("cpu"))
    checksums.launch([2, 0, 1])
    found = parts.join(checksums.wait().reshape(num_blocks, -1, num_planes).transpose(0, 2, 1))
    assert found.dtype == np.uint32
    assert np.array_equal(found, page_sums(whole[:, [2, 0, 1]].reshape(-1, page_nbytes)).reshape(num_planes, -1).T)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 15))
def test_parts_are_pieces_of_shards_that_cover_the_page(words: int, num_shards: int, shift: int) -> None:
    """Each is whole rows or within one, and every factor is odd: one changed word always shows."""
    page_nbytes = 4 * num_shards * (words << shift)
    parts = part_sums(page_nbytes, num_shards)
    assert len(parts.first_columns) == len(parts.factors) and len(parts.factors) % num_shards == 0
    assert (parts.factors % 2 == 1).all() and parts.factors[-1] == 1


def test_shards_that_are_no_words_are_refused() -> None:
    with pytest.raises(ValueError, match="can't be cut into 3 shards"):
        part_sums(64, 3)
