"""A pool of Llama-8B's shape for the raw parts of bench.handoff_gpu, and a pattern in it that both sides know."""

from collections.abc import Sequence

import torch

from contracts.layout import KVLayout
from engine.cuda.memory import allocate
from engine.cuda.pages import DevicePages
from kernels import caps, catalog

NVLINK_RATE = 450e9
LAYOUT = KVLayout(
    model="raw", num_layers=32, num_kv_heads=8, head_dim=128, block_size=64, dtype="float8_e4m3fn", scales="none"
)
RAW_BLOCKS = 2047


def raw_pool(device: str) -> DevicePages:
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    memory = allocate(LAYOUT.block_nbytes * (RAW_BLOCKS + 1), where)
    pool = DevicePages(memory, LAYOUT, RAW_BLOCKS, catalog.registry(caps.detect(where.type)))
    pool.warm_up()
    return pool


def fill(pool: DevicePages) -> None:
    """A pattern that both sides know."""
    words = pool.memory.tensor.view(torch.int32)
    torch.manual_seed(0)
    words.copy_(torch.arange(len(words), dtype=torch.int32, device=words.device) * 1103515245)
    if words.is_cuda:
        torch.cuda.synchronize()


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
