"""The GPUs that compute one model together, by torch.distributed.

NCCL, and gloo for its twin on the CPU.
"""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from engine.model_loader.tensor_parallel_shards import WHOLE, Shard

_HOST = "127.0.0.1"
# Weights are read, and kernels compiled, between the first calls; one of several processes may take long.
_TIMEOUT = timedelta(minutes=15)


class ProcessGroup:
    """All members make the same calls in the same order. This one is a team of one, which calls nobody."""

    shard = WHOLE

    def add(self, x: Tensor) -> None:
        """In place, the sum over all members, to the bit the same on each."""

    def gather(self, columns: Tensor) -> Tensor:
        """`[R, n]` of each to `[R, n * members]`, in their order."""
        return columns

    def follow(self, x: Tensor) -> None:
        """In place, what the first member has."""

    def largest(self, x: Tensor) -> Tensor:
        return x

    def smallest(self, number: int) -> int:
        return number

    def exchange(self, name: str, told: bytes) -> list[bytes]:
        """What each tells under that name, in their order."""
        return [told]

    def meet(self) -> None:
        """What is launched behind this comes after what all members launched before it."""

    def close(self) -> None:
        """Nothing of theirs is under way."""


SINGLE_PROCESS = ProcessGroup()


class DistributedProcessGroup(ProcessGroup):
    """A process for each member; one team a process."""

    def __init__(self, shard: Shard, store: TCPStore, device: torch.device) -> None:
        self.shard, self._store, self._device = shard, store, device
        is_cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=store,
            rank=shard.rank,
            world_size=shard.size,
            timeout=_TIMEOUT,
            device_id=device if is_cuda else None,
        )
        self._nothing = torch.zeros(1, device=device)

    def add(self, x: Tensor) -> None:
        dist.all_reduce(x)

    def gather(self, columns: Tensor) -> Tensor:
        rows, width = columns.shape
        parts = columns.new_empty(self.shard.size, rows, width)
        dist.all_gather(list(parts), columns.contiguous())
        return parts.transpose(0, 1).reshape(rows, -1)

    def follow(self, x: Tensor) -> None:
        dist.broadcast(x, 0)

    def largest(self, x: Tensor) -> Tensor:
        found = x.to(self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.to(x.device)

    def smallest(self, number: int) -> int:
        found = torch.tensor(number, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found.item())

    def exchange(self, name: str, told: bytes) -> list[bytes]:
        self._store.set(f"{name}/{self.shard.rank}", told.hex())
        return [bytes.fromhex(self._store.get(f"{name}/{rank}").decode()) for rank in range(self.shard.size)]

    def meet(self) -> None:
        dist.all_reduce(self._nothing)

    def close(self) -> None:
        dist.destroy_process_group()


def hold_store(size: int) -> TCPStore:
    """Return the store in which members find each other, held by the first one."""
    # Left to itself it would listen to every network.
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    fd = listener.detach()
    return TCPStore(_HOST, port, size, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def open_store(size: int, port: int) -> TCPStore:
    """The one that the first member holds."""
    return TCPStore(_HOST, port, size, is_master=False)
