"""A device's pool for the transfer tests: in a host's memory, or on the GPUs that KV_TEST_DEVICE and
KV_TEST_DECODE_DEVICE name.
"""

import os

import numpy as np
import torch

from contracts.layout import KVLayout
from engine.cuda.memory import HostMemory, allocate
from engine.cuda.pages import DevicePages
from kernels import catalog
from kernels.caps import Caps, detect

DEVICE = torch.device(os.environ.get("KV_TEST_DEVICE", "cpu"))
DECODE_DEVICE = torch.device(os.environ.get("KV_TEST_DECODE_DEVICE", str(DEVICE)))


def device_pool(name: str, pages: np.ndarray, layout: KVLayout) -> DevicePages:
    """Of the worker `name`, holding these `[num_planes, num_blocks, page_nbytes]`."""
    torch.set_num_threads(1)
    num_blocks, device = pages.shape[1], DECODE_DEVICE if name.startswith("decode") else DEVICE
    if device.type == "cuda":
        torch.cuda.set_device(device)
    memory = allocate(layout.block_nbytes * (num_blocks + 1), device)
    found = detect() if DEVICE.type == "cuda" else Caps("cpu")
    pool = DevicePages(memory, layout, num_blocks, catalog.registry(found))
    whole = memory.tensor.view(layout.num_planes, num_blocks + 1, layout.page_nbytes)
    whole[:, :num_blocks].copy_(torch.from_numpy(pages))
    return pool


def host_view(pool: DevicePages) -> np.ndarray:
    """Its pages without the spare ones; on a GPU a copy."""
    whole = pool.memory.tensor.view(pool.num_planes, pool.num_blocks + 1, pool.page_nbytes)
    return whole[:, : pool.num_blocks].cpu().numpy()


def close_pool(pool: DevicePages) -> None:
    if isinstance(pool.memory, HostMemory):
        pool.memory.close()
        pool.close()
