"""The order of a block's bytes that does not depend on how many shards a cache lies in.

It is that of a cache with one shard: `[planes, blocks, page]`, where a page holds all KV heads. A shard's page holds a
share of them, one after the other, so the shards' pages of a block in a plane, side by side, are the whole page.
"""

from collections.abc import Sequence

import numpy as np


def join_shards(shards: Sequence[np.ndarray]) -> np.ndarray:
    """Return the whole pages of a block, or of several, from those of its shards.

    `shards`: uint8 `[..., page_nbytes]` each, in the order of their heads. Raises ValueError if their shapes differ.
    """
    if len({shard.shape for shard in shards}) != 1:
        raise ValueError(f"shards of one cache have pages of one shape, not {[shard.shape for shard in shards]}")
    return np.concatenate(shards, axis=-1)


def split_shards(pages: np.ndarray, tp_size: int) -> list[np.ndarray]:
    """Return the shards of whole pages, uint8 `[..., page_nbytes]`, as views, in the order of their heads.

    Raises ValueError for a page that can't be cut into so many.
    """
    page_nbytes = pages.shape[-1]
    if page_nbytes % tp_size:
        raise ValueError(f"pages of {page_nbytes} bytes can't be cut into {tp_size} shards")
    return np.split(pages, tp_size, axis=-1)


def join_parts(chunk: np.ndarray, num_parts: int, num_planes: int, num_blocks: int) -> np.ndarray:
    """Return the whole pages `[num_planes, num_blocks, page_nbytes]` of a group's chunk in host memory.

    `chunk`: uint8, part by part, and in each plane by plane, then in token order (see chunk_plan.row_ids). Raises
    ValueError if its size is not a multiple of that.
    """
    parts = chunk.reshape(num_parts, num_planes, num_blocks, -1)
    return np.ascontiguousarray(np.moveaxis(parts, 0, 2)).reshape(num_planes, num_blocks, -1)


def split_parts(pages: np.ndarray, num_parts: int) -> np.ndarray:
    """Return the chunk whose whole pages these are: the reverse of `join_parts`.

    `pages`: uint8 `[num_planes, num_blocks, page_nbytes]`. Raises ValueError if they can't be cut into so many parts.
    """
    num_planes, num_blocks, page_nbytes = pages.shape
    if page_nbytes % num_parts:
        raise ValueError(f"pages of {page_nbytes} bytes can't be cut into {num_parts} parts")
    parts = pages.reshape(num_planes, num_blocks, num_parts, -1)
    return np.ascontiguousarray(np.moveaxis(parts, 2, 0)).reshape(-1)
