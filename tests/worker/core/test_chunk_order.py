"""Chunks are taken in order: of each stretch of tokens every group of layers, then the next stretch."""

import msgspec
import pytest

from contracts.errors import Corrupt
from contracts.handoff import ChunkHeader
from contracts.ids import Epoch, RequestId
from worker.core.chunk_order import ChunkOrder

FIRST = ChunkHeader(RequestId("r"), Epoch(1), 0, 16, 32, "layout", 100, 0)


def header(**changes: int) -> ChunkHeader:
    return msgspec.structs.replace(FIRST, **changes)


def test_tokens_are_here_when_every_group_of_them_has_come() -> None:
    order = ChunkOrder((16, 16, 16))
    for group in range(3):
        assert order.next_token == 16
        order.take(header(index=group, group=group))
    assert (order.next_token, order.num_chunks, order.nbytes) == (48, 3, 300)
    order.take(header(index=3, first_token=48))
    assert order.next_token == 48


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"index": 2, "group": 1}, "chunk 2 at token 16 of group 1; expected 1"),
        ({"index": 1}, "chunk 1 at token 16 of group 0; expected 1 at 16 of group 1"),
        ({"index": 1, "group": 1, "first_token": 48}, "chunk 1 at token 48"),
        ({"index": 1, "group": 1, "num_tokens": 16}, "ends at token 32 in group 1, one before it at 48"),
    ],
)
def test_a_chunk_that_is_not_the_next_is_refused(changes: dict[str, int], reason: str) -> None:
    order = ChunkOrder((16, 16))
    order.take(FIRST)
    with pytest.raises(Corrupt, match=reason):
        order.take(header(**changes))


@pytest.mark.parametrize(
    ("num_taken", "num_chunks", "num_missing", "is_possible"),
    [
        (2, 4, 1, True),
        (2, 6, 2, True),
        (2, 2, 1, False),
        (2, 6, 1, False),
        (2, 2, 0, True),
        (2, 4, 0, False),
        (3, 4, 1, True),
        (3, 3, 1, False),
    ],
)
def test_a_number_of_chunks_that_can_never_arrive_is_noticed(
    num_taken: int, num_chunks: int, num_missing: int, is_possible: bool
) -> None:
    order = ChunkOrder((16, 16))
    for index in range(num_taken):
        order.take(header(index=index, group=index % 2, first_token=16 + 32 * (index // 2)))
    assert (order.contradiction(num_chunks, order.next_token + 16 * num_missing, 16) is None) == is_possible


def test_a_group_of_short_life_begins_later() -> None:
    order = ChunkOrder((16, 64))
    assert order.contradiction(2, 80, 16) is None and order.contradiction(5, 80, 16) is None
    assert order.contradiction(1, 80, 16) is not None and order.contradiction(6, 80, 16) is not None
    order.take(FIRST)
    assert order.next_token == 48
    order.take(header(index=1, first_token=48))  # tokens 48 to 80
    assert order.next_token == 48 and order.contradiction(3, 80, 16) is None
    with pytest.raises(Corrupt, match="chunk 2 at token 48 of group 1; expected 2 at 64 of group 1"):
        order.take(header(index=2, first_token=48, group=1))
    order.take(header(index=2, first_token=64, group=1, num_tokens=16))
    assert order.next_token == 80 and order.contradiction(3, 80, 16) is None


def test_of_windows_alone_nothing_moves_before_them() -> None:
    order = ChunkOrder((64, 48))
    assert order.next_token == 48
    order.take(header(first_token=48, num_tokens=16, group=1))
    assert order.next_token == 64
