"""A pool of Llama-8B's shape for the raw parts of bench.handoff_gpu, and a pattern in it that both sides know."""

from collections.abc import Sequence

import msgspec
import torch

from contracts.layout import KVLayout
from engine.cuda.memory import allocate
from engine.cuda.pages import DevicePages
from kernels import caps, catalog
from kernels.reference.quant import to_e4m3

NVLINK_RATE = 450e9
LAYOUT = KVLayout(
    model="raw", num_layers=32, num_kv_heads=8, head_dim=128, block_size=64, dtype="float8_e4m3fn", scales="none"
)
WIDE = msgspec.structs.replace(LAYOUT, dtype="bfloat16")
"""Of a prefill whose peer has LAYOUT."""
RAW_BLOCKS = 2047


def raw_pool(device: str, layout: KVLayout = LAYOUT) -> DevicePages:
    """Of e4m3 it has scales that differ by plane."""
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    memory = allocate(layout.block_nbytes * (RAW_BLOCKS + 1), where)
    scales = [0.01 + 0.003 * plane for plane in range(layout.num_planes)] if layout is LAYOUT else []
    pool = DevicePages(memory, layout, RAW_BLOCKS, catalog.registry(caps.detect(where.type)), scales)
    pool.warm_up()
    return pool


def fill(pool: DevicePages) -> None:
    """A pattern that both sides know."""
    words = pool.memory.tensor.view(torch.int32)
    torch.manual_seed(0)
    words.copy_(torch.arange(len(words), dtype=torch.int32, device=words.device) * 1103515245)
    if words.is_cuda:
        torch.cuda.synchronize()


def fill_values(pool: DevicePages) -> None:
    """The same in bf16, of numbers that rounding changes."""
    for plane in range(pool.num_planes):
        values = _values(plane, torch.arange(RAW_BLOCKS, device=pool.device), pool.page_nbytes // 2)
        pool.memory.tensor.view(pool.num_planes, RAW_BLOCKS + 1, -1)[plane, :RAW_BLOCKS] = values.view(torch.uint8)


def holds_rounded(pool: DevicePages, pages: Sequence[int], into: Sequence[int]) -> bool:
    """Whether `fill_values` of `pages` is in `into`, rounded by this pool's scales."""
    planes = pool.memory.tensor.view(pool.num_planes, RAW_BLOCKS + 1, -1)
    for plane, scale in enumerate(pool.scales):
        values = _values(plane, torch.tensor(pages, device=pool.device), pool.page_nbytes)
        if not torch.equal(planes[plane, list(into)], to_e4m3(values.float() * (1.0 / scale)).view(torch.uint8)):
            return False
    return True


def _values(plane: int, pages: torch.Tensor, width: int) -> torch.Tensor:
    inner = torch.arange(width, device=pages.device)
    return (((pages[:, None] * 131 + plane * 17 + inner * 7) % 1009 - 504) * 0.037).bfloat16()


def holds(pool: DevicePages, pages: Sequence[int], into: Sequence[int]) -> bool:
    """Whether the peer's pattern of `pages` is in `into`."""
    planes = pool.memory.tensor.view(torch.int32).view(pool.num_planes, RAW_BLOCKS + 1, -1)
    width = planes.shape[2]
    inner = torch.arange(width, dtype=torch.int64, device=planes.device)
    for page, target in zip(pages[:8], into[:8], strict=True):
        for plane in (0, pool.num_planes - 1):
            first = (plane * (RAW_BLOCKS + 1) + page) * width
            expected = ((first + inner) * 1103515245 & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
            if not torch.equal(planes[plane, target], expected):
                return False
    return True
