"""The plan of a chunk: which bytes go where, as block ids and offsets only.

A plan holds no address, so it can be made, checked and logged anywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from contracts.layout import KVLayout


@dataclass(frozen=True, slots=True)
class UnitRange:
    """The units `[first, last)` of a chunk (see staging) that one message carries."""

    first: int
    last: int

    @property
    def num_units(self) -> int:
        return self.last - self.first


def split(num_units: int, units_per_message: int) -> Iterator[UnitRange]:
    """Yield the ranges that cut a chunk into messages of at most `units_per_message`."""
    for first in range(0, num_units, units_per_message):
        yield UnitRange(first, min(first + units_per_message, num_units))


def row_ids(pages: Sequence[int], num_planes: int, num_blocks: int) -> np.ndarray:
    """Return the rows of a chunk in the pool, seen as `[num_planes * num_blocks]` pages, in byte order.

    The order is plane by plane, then token order. The rows of one part of a page come before those of the next:
    `num_planes` counts the planes of all parts.
    """
    planes = np.arange(num_planes, dtype=np.intp)[:, None] * num_blocks
    return (planes + np.asarray(pages, dtype=np.intp)).reshape(-1)


def chunk_nbytes(layout: KVLayout, num_tokens: int, index: int = 0) -> int:
    """Return the bytes of a chunk of this many tokens in one group, which fills whole blocks."""
    group = layout.groups[index]
    return group.num_blocks(num_tokens) * group.block_nbytes


def check_chunk(layout: KVLayout, index: int, first_token: int, num_tokens: int, pages: Sequence[int]) -> None:
    """Raise ValueError unless these are the pages of tokens that may be a chunk of one group."""
    if not 0 <= index < len(layout.groups):
        raise ValueError(f"group is {index}; the layout has {len(layout.groups)}")
    num_pages = layout.groups[index].num_blocks(num_tokens)
    if num_tokens <= 0 or first_token % layout.block_size or len(pages) != num_pages:
        raise ValueError(f"{len(pages)} pages do not fit {num_tokens} tokens from {first_token} on")


def check_pages(pages: Sequence[int], num_blocks: int) -> None:
    """Raise ValueError unless all pages are different and inside a pool of `num_blocks`."""
    for page in pages:
        if not 0 <= page < num_blocks:
            raise ValueError(f"page {page} is outside the pool of {num_blocks} blocks")
    if len(set(pages)) != len(pages):
        raise ValueError("a page is named twice")
