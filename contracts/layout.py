"""The layout of a KV cache's bytes, which two workers compare before they move any."""

import hashlib
from functools import lru_cache

import msgspec

from contracts.errors import LayoutMismatch

ITEM_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A paged cache of planes of pages `[kv_heads, block, head_dim]`.

    Plane 2 * layer is the K of a layer, 2 * layer + 1 its V. The cache lies in `tp_size` shards by KV heads. Each is
    one allocation `[num_planes, num_blocks, page_nbytes]` of a GPU: the shards' parts of a block in a plane, one after
    the other, are the page of a cache with one shard. A group with more GPUs than KV heads has copies of each shard,
    which do not appear here. `model` is a fingerprint of configuration and weights, since the KV of one model means
    nothing to another. `scales` says where quantization scales are kept ("none": not quantized).
    """

    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    scales: str = "none"
    tp_size: int = 1

    @property
    def num_planes(self) -> int:
        return 2 * self.num_layers

    @property
    def page_nbytes(self) -> int:
        """Return the bytes of one block in one plane of one shard."""
        return self.num_kv_heads // self.tp_size * self.block_size * self.head_dim * ITEM_NBYTES[self.dtype]

    @property
    def shard_nbytes(self) -> int:
        """Return the bytes of one block in all planes of one shard."""
        return self.num_planes * self.page_nbytes

    @property
    def block_nbytes(self) -> int:
        """Return the bytes of one block in all planes of all shards."""
        return self.tp_size * self.shard_nbytes

    @property
    def layout_id(self) -> str:
        return _digest_of(self)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def difference(self, theirs: "KVLayout") -> str | None:
        """Return the first field that differs, or None."""
        return next((f for f in self.__struct_fields__ if getattr(self, f) != getattr(theirs, f)), None)

    def require_match(self, theirs: "KVLayout") -> None:
        """Raise LayoutMismatch with the first field that differs."""
        if field := self.difference(theirs):
            raise LayoutMismatch(field, getattr(self, field), getattr(theirs, field))


@lru_cache(maxsize=64)  # needed for each chunk, and a pool has few layouts
def _digest_of(layout: KVLayout) -> str:
    return hashlib.blake2b(msgspec.json.encode(layout, order="sorted"), digest_size=8).hexdigest()
