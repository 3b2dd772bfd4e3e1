"""The cache cut by KV heads, as finely as the finer of two groups of workers has it in shards.

What is summed, packed and copied then is a part of a page.

A page is `[kv_heads, block, head_dim]`, so the heads of a finer shard are contiguous in it, and the parts are of one
width whichever side they are seen from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from contracts.errors import TransferError
from engine.cuda.runtime.shared_memory import Grid


@dataclass(frozen=True)
class HeadPart:
    """A part of the heads in the pages of one shard.

    `width` bytes from `offset` on of each page of a shard's `planes` `[num_planes, num_blocks + 1, page_nbytes]`.
    """

    planes: Tensor
    offset: int
    width: int

    @property
    def grid(self) -> Grid:
        num_planes, num_pages, page_nbytes = self.planes.shape
        return grid(num_planes, num_pages, page_nbytes, self.width, self.offset)

    @property
    def rows(self) -> Tensor:
        """`[num_planes * (num_blocks + 1), width]`."""
        return self.planes.view(-1, self.planes.shape[2])[:, self.offset : self.offset + self.width]


def grid(num_planes: int, num_pages: int, page_nbytes: int, width: int, offset: int) -> Grid:
    return Grid(num_planes, num_pages * page_nbytes, page_nbytes, width, offset)


def spans(num_shards: int, page_nbytes: int, num_parts: int) -> list[tuple[int, int, int]]:
    """Return of each part, in the order of the heads.

    The shard it lies in, where in a page, and how many bytes.

    Raises TransferError if shards can't be cut into so many.
    """
    each = num_parts // num_shards
    if num_parts % num_shards or page_nbytes % each:
        raise TransferError(
            f"{num_shards} shards with pages of {page_nbytes} bytes can't be cut into {num_parts} parts"
        )
    width = page_nbytes // each
    return [(shard, index * width, width) for shard in range(num_shards) for index in range(each)]


def cut(shards: Sequence[Tensor], num_parts: int) -> list[HeadPart]:
    """`shards`: the planes of each. Raises TransferError as `spans`."""
    found = spans(len(shards), shards[0].shape[2], num_parts)
    return [HeadPart(shards[shard], offset, width) for shard, offset, width in found]
