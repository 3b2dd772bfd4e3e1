"""The paged KV cache on a GPU."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contracts.errors import ConfigError
from contracts.ids import BlockId
from contracts.layout import KVLayout
from engine.cuda.kv.page_checksums import DeviceChecksums, PendingChecksums
from engine.cuda.kv.transfer_pool import DeviceTransferPool
from engine.cuda.runtime.bindings import MAX_PITCH_NBYTES
from engine.cuda.runtime.shared_memory import allocate
from kernels.registry import Registry

_MEMORY_PAGE_NBYTES = 2 << 20
"""A page of the GPU's memory."""


@dataclass(frozen=True)
class LayerCache:
    """The pages of one layer.

    `keys`, `values` `[num_blocks + 1, kv_heads, block, head_dim]` of our shard, each to be multiplied by its scale.
    `k_offset` `[kv_heads, head_dim]`: what smooth keys have lost (kernels.specs.RopeSpec).
    """

    index: int
    keys: Tensor
    values: Tensor
    k_scale: float
    v_scale: float
    k_offset: Tensor | None


class DeviceCache:
    """The pages of our shard.

    `[num_planes, num_blocks + 1, kv_heads, block, head_dim]` in one allocation, plane 2 * layer K, 2 * layer + 1 V.
    `layout` is of the whole group of workers, and has one group of layers.

    The last block belongs to nobody: the rows that pad a batch write there. `scales` `[layers, 2]`: those of K and of V
    by layer, on the host; none for 1. `k_offsets` `[layers, kv_heads, head_dim]`: the keys are smooth. Raises
    ConfigError if the device has not so much memory.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Tensor | None = None,
        k_offsets: Tensor | None = None,
    ) -> None:
        self.layout = layout if scales is None else layout.with_groups(scales=_name(scales, k_offsets))
        group = layout.only_group
        self.num_blocks = num_blocks
        self.device = device
        heads = group.num_kv_heads // layout.tp_size
        shape = (group.num_planes, num_blocks + 1, heads, group.block_size, group.head_dim)
        # Zeros: what is masked weighs 0, and 0 times a NaN of uninitialised memory is a NaN.
        self._memory = allocate(layout.shard_nbytes * (num_blocks + 1), device)
        self._planes = self._memory.tensor.view(dtype).view(shape)
        chosen = torch.ones(group.num_layers, 2) if scales is None else scales
        offsets = [None] * group.num_layers if k_offsets is None else k_offsets
        self._layers = [
            LayerCache(index, self._planes[2 * index], self._planes[2 * index + 1], k_scale, v_scale, offset)
            for index, ((k_scale, v_scale), offset) in enumerate(zip(chosen.tolist(), offsets, strict=True))
        ]
        self._is_smooth = k_offsets is not None
        self._pages: DeviceTransferPool | None = None

    def clear(self) -> None:
        """Make it as it was at first."""
        self._planes.view(torch.uint8).zero_()

    def export(self) -> bytes:
        """What the first worker of our group needs to take our shard into its `share`.

        Raises TransferError where the device does not let others in; the cache must outlive what they do with it.
        """
        return self._memory.share()

    def share(self, registry: Registry, followers: Sequence[bytes] = ()) -> None:
        """From now on there is a `transfer_pool`.

        `followers`: what the other workers of our group said by `export`, in the order of their heads. Raises
        TransferError if one can't be mapped.
        """
        # Smooth keys are more than rounded: no peer's bf16 pages become such by the way.
        can_round = self._planes.dtype is torch.float8_e4m3fn and not self._is_smooth
        scales = [scale for layer in self._layers for scale in (layer.k_scale, layer.v_scale)] if can_round else []
        self._pages = DeviceTransferPool(self._memory, self.layout, self.num_blocks, registry, scales, followers)
        self._pages.warm_up()

    @property
    def transfer_pool(self) -> DeviceTransferPool:
        assert self._pages is not None, "a cache that warms up is handed over to nobody"
        return self._pages

    @property
    def pool_bytes(self) -> np.ndarray:
        raise ConfigError("the KV cache of a GPU is not in the host's memory")

    def written(self) -> None:
        """All that the batch writes for its prompts has been launched: `checksums` are asked for next."""
        if self._pages is not None:
            self._pages.written()

    def checksums(self, blocks: Sequence[BlockId]) -> DeviceChecksums | PendingChecksums | None:
        return self._pages.checksums_aside(blocks) if self._pages is not None and self._pages.checks else None

    def checksums_behind(self, blocks: Sequence[BlockId]) -> DeviceChecksums | PendingChecksums:
        return self.transfer_pool.checksums_behind(blocks)

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]


def _name(scales: Tensor, k_offsets: Tensor | None) -> str:
    """KV that was divided by other scales, or lost another offset, means nothing here."""
    said = [scales.numpy().tobytes(), b"" if k_offsets is None else k_offsets.cpu().numpy().tobytes()]
    return f"layer-{hashlib.blake2b(b''.join(said), digest_size=8).hexdigest()}"


def whole_blocks(num_blocks: int, page_nbytes: int) -> int:
    """Return at most so many blocks that planes end on a page of the GPU's memory.

    With the spare one, a plane's pages end where a page of the GPU's memory does, and that a copy's pitch allows.
    Pulled from planes that end elsewhere, 512 MiB came at 265 GB/s, not at 273 to 287 (two H200).
    """
    num_pages = min(num_blocks + 1, MAX_PITCH_NBYTES // page_nbytes)
    step = _MEMORY_PAGE_NBYTES // math.gcd(_MEMORY_PAGE_NBYTES, page_nbytes)
    return (num_pages // step * step if num_pages >= 16 * step else num_pages) - 1
