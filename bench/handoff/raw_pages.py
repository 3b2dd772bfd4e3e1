"""The pools and the patterns in them for the raw parts of bench.handoff.gpu."""

from collections.abc import Sequence

import torch

from contracts.layout import KVLayout
from engine.cuda.kv.transfer_pool import DeviceTransferPool
from engine.cuda.runtime.shared_memory import Memory, allocate
from kernels import caps, catalog
from kernels.reference.quant import to_e4m3

NVLINK_RATE = 450e9
LAYOUT = KVLayout.uniform(
    model="raw", num_layers=32, num_kv_heads=8, head_dim=128, block_size=64, dtype="float8_e4m3fn", scales="none"
)
WIDE = LAYOUT.with_groups(dtype="bfloat16")
"""The layout of a prefill in bf16 whose peer has LAYOUT."""
RAW_BLOCKS = 2047


def raw_pool(device: str, layout: KVLayout = LAYOUT, followers: Sequence[bytes] = ()) -> DeviceTransferPool:
    """Return a pool of this layout; an e4m3 one has scales that differ by plane."""
    where = torch.device(device)
    memory = raw_memory(where, layout)
    planes = range(LAYOUT.only_group.num_planes)
    scales = [0.01 + 0.003 * plane for plane in planes] if is_narrow(layout) else []
    pool = DeviceTransferPool(memory, layout, RAW_BLOCKS, catalog.registry(caps.detect(where.type)), scales, followers)
    pool.warm_up()
    return pool


def is_narrow(layout: KVLayout) -> bool:
    """Return whether pages of this layout are e4m3."""
    return layout.only_group.dtype == LAYOUT.only_group.dtype


def raw_memory(device: torch.device, layout: KVLayout) -> Memory:
    """Allocate the memory of one shard."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return allocate(layout.shard_nbytes * (RAW_BLOCKS + 1), device)


def fill(pool: DeviceTransferPool) -> None:
    """Fill the pool with a pattern that both sides know: each word of a page tells which one it is."""
    for number, shard in enumerate(pool._shards):
        words = shard.view(torch.int32)
        width = words.shape[2]
        inner = torch.arange(number * width, (number + 1) * width, device=words.device)
        pages = torch.arange(words.shape[1], device=words.device)[:, None] * (width * pool.num_shards)
        for plane, rows in enumerate(words):
            first = plane * words.shape[1] * width * pool.num_shards
            rows.copy_(_pattern(first + pages + inner))
    if pool.device.type == "cuda":
        torch.cuda.synchronize()


def _pattern(places: torch.Tensor) -> torch.Tensor:
    return (places * 1103515245 & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def fill_values(pool: DeviceTransferPool) -> None:
    """Fill a bf16 pool with a pattern of numbers that rounding changes."""
    for plane in range(pool.num_planes):
        width = pool.num_shards * pool.page_nbytes // 2
        values = _values(plane, torch.arange(RAW_BLOCKS, device=pool.device), width).view(torch.uint8)
        for shard, part in zip(pool._shards, values.chunk(pool.num_shards, dim=1), strict=True):
            shard[plane, :RAW_BLOCKS] = part


def holds_rounded(pool: DeviceTransferPool, pages: Sequence[int], into: Sequence[int]) -> bool:
    """Return whether `into` has what `fill_values` wrote to `pages`, rounded by this pool's scales."""
    for plane, scale in enumerate(pool.scales):
        values = _values(plane, torch.tensor(pages, device=pool.device), pool.num_shards * pool.page_nbytes)
        found = torch.cat([shard[plane, list(into)] for shard in pool._shards], dim=1)
        if not torch.equal(found, to_e4m3(values.float() * (1.0 / scale)).view(torch.uint8)):
            return False
    return True


def _values(plane: int, pages: torch.Tensor, width: int) -> torch.Tensor:
    inner = torch.arange(width, device=pages.device)
    return (((pages[:, None] * 131 + plane * 17 + inner * 7) % 1009 - 504) * 0.037).bfloat16()


def holds(pool: DeviceTransferPool, pages: Sequence[int], into: Sequence[int]) -> bool:
    """Return whether `into` has the pattern that the peer wrote to `pages`."""
    shards = [shard.view(torch.int32) for shard in pool._shards]
    width = sum(shard.shape[2] for shard in shards)
    inner = torch.arange(width, dtype=torch.int64, device=pool.device)
    for page, target in zip(pages[:8], into[:8], strict=True):
        for plane in (0, pool.num_planes - 1):
            first = (plane * (RAW_BLOCKS + 1) + page) * width
            if not torch.equal(torch.cat([shard[plane, target] for shard in shards]), _pattern(first + inner)):
                return False
    return True
