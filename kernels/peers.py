"""The buffers of all ranks of a host as one rank sees them, for operations that read their peers' memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_CTAS = 64


@dataclass(frozen=True)
class SymmetricMemory:
    """Symmetric memory of `world` ranks, mapped into this process.

    buffers: bf16 [tokens, hidden] of each rank, written before the operation. flags: int32 [MAX_CTAS, world] of each
    rank, zeroed once. epoch: int32 [MAX_CTAS] of this rank alone, zeroed once. The pointers are the tensors' addresses,
    int64 [world], on the device.
    """

    rank: int
    buffers: tuple[Tensor, ...]
    flags: tuple[Tensor, ...]
    epoch: Tensor
    buffer_ptrs: Tensor
    flag_ptrs: Tensor

    @classmethod
    def of(cls, rank: int, buffers: tuple[Tensor, ...], flags: tuple[Tensor, ...]) -> "SymmetricMemory":
        device = buffers[rank].device
        epoch = torch.zeros(MAX_CTAS, dtype=torch.int32, device=device)
        return cls(rank, buffers, flags, epoch, addresses(buffers, device), addresses(flags, device))

    @classmethod
    def arrived(cls, rank: int, buffers: tuple[Tensor, ...]) -> "SymmetricMemory":
        """A twin for one process: the other ranks count as there already, whatever the epoch."""
        shape = (MAX_CTAS, len(buffers))
        flags = tuple(torch.full(shape, 1 << 30, dtype=torch.int32, device=b.device) for b in buffers)
        return cls.of(rank, buffers, flags)


def addresses(tensors: tuple[Tensor, ...], device: torch.device) -> Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)
