"""A device's pool for the transfer tests: in a host's memory, or on the GPUs that KV_TEST_DEVICE and
KV_TEST_DECODE_DEVICE name. KV_TEST_PREFILL_COPIES and KV_TEST_DECODE_COPIES say how many GPUs hold each shard.
"""

import os

import numpy as np
import torch

from contracts.layout import KVLayout
from engine.cuda.kv.transfer_pool import DeviceTransferPool
from engine.cuda.runtime.shared_memory import HostMemory, allocate
from kernels import catalog
from kernels.caps import Caps, detect
from kernels.registry import Registry

DEVICE = torch.device(os.environ.get("KV_TEST_DEVICE", "cpu"))
DECODE_DEVICE = torch.device(os.environ.get("KV_TEST_DECODE_DEVICE", str(DEVICE)))


def device_pool(name: str, pages: np.ndarray, layout: KVLayout) -> DeviceTransferPool:
    """Return the pool of the worker `name` that holds `pages`.

    They are `[num_planes, num_blocks, bytes of a page in all shards]`.
    """
    torch.set_num_threads(1)
    side = "DECODE" if name.startswith("decode") else "PREFILL"
    num_blocks, device = pages.shape[1], DECODE_DEVICE if side == "DECODE" else DEVICE
    num_copies = int(os.environ.get(f"KV_TEST_{side}_COPIES", "1"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found = detect() if DEVICE.type == "cuda" else Caps("cpu")
    pool = GroupPages(layout, num_blocks, device, catalog.registry(found), num_copies)
    for shards in pool.copies:
        for part, shard in zip(np.split(pages, layout.tp_size, axis=2), shards, strict=True):
            shard[:, :num_blocks].copy_(torch.from_numpy(part))
    return pool


class GroupPages(DeviceTransferPool):
    """With the memories of its followers, which live in this process too."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device, registry: Registry, num_copies: int = 1
    ) -> None:
        nbytes = layout.shard_nbytes * (num_blocks + 1)
        self.memories = [allocate(nbytes, device) for _ in range(layout.tp_size * num_copies)]
        followers = [memory.share() for memory in self.memories[1:]]
        super().__init__(self.memories[0], layout, num_blocks, registry, followers=followers)


def host_view(pool: DeviceTransferPool) -> np.ndarray:
    """Its whole pages without the spare ones; on a GPU, or of several shards, a copy."""
    parts = [shard[:, : pool.num_blocks].cpu().numpy() for shard in pool._shards]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)


def close_pool(pool: DeviceTransferPool) -> None:
    for memory in pool.memories if isinstance(pool, GroupPages) else [pool.memory]:
        if isinstance(memory, HostMemory):
            memory.close()
            pool.close()
