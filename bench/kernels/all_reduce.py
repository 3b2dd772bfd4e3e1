# pyright: reportOptionalMemberAccess=false
"""The benchmark of all-reduce fused with residual, norm and quantization on the GPUs of one host.

    torchrun --nproc-per-node 2 -m bench.kernels.all_reduce --out FILE

The peers are NCCL followed by a separate norm, and torch's one-shot all-reduce with the rest by torch.compile. NVLink
multicast is not used. The peers' buffers are mapped through torch's symmetric memory.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from bench.kernels.__main__ import write
from bench.kernels.figure import Figure, show
from bench.kernels.torch_compile import compiled, norm_quant
from kernels import caps as capabilities
from kernels import catalog
from kernels.cases import relative_error
from kernels.peers import MAX_CTAS, SymmetricMemory
from kernels.registry import Registry
from kernels.specs import NormSpec, ReduceSpec
from kernels.timing import capture, replay_ms

HIDDEN, EPS, NVLINK = 4096, 1e-5, 450e9
TOKENS = (1, 4, 16, 64, 256, 1024)  # 8 kB to 8 MB of bf16


def group(rank: int, world: int, tokens: int) -> SymmetricMemory:
    """Return this rank's symmetric buffer and flags, and those of its peers as mapped here."""
    buffers = shared(rank, world, (tokens, HIDDEN), torch.bfloat16)
    return SymmetricMemory.of(rank, buffers, shared(rank, world, (MAX_CTAS, world), torch.int32))


def shared(rank: int, world: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return a tensor of zeros for each rank.

    This rank's is the allocation itself, which keeps it alive.
    """
    own = symmetric.empty(shape, dtype=dtype, device=torch.device("cuda", torch.cuda.current_device())).zero_()
    handle = symmetric.rendezvous(own, dist.group.WORLD)  # type: ignore[arg-type]
    return tuple(own if peer == rank else handle.get_buffer(peer, shape, dtype) for peer in range(world))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("all_reduce.json"))
    args = options.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    caps = capabilities.detect()
    registry = catalog.registry(caps)
    rows = [size_row(registry, group(rank, world, tokens), tokens) for tokens in TOKENS]
    if rank == 0:
        write(args.out, [show(row) for row in rows], caps, ["all_reduce"])
    dist.destroy_process_group()


def size_row(registry: Registry, peers: SymmetricMemory, tokens: int) -> Figure:
    """Check the result for this many tokens, then time a graph of ten launches each way."""
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    start = torch.randn(tokens, HIDDEN, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    weight = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    peers.buffers[peers.rank].copy_(x)
    total = x.float()
    dist.all_reduce(total)
    ours, out, scale = (
        start.clone(),
        torch.empty(tokens, HIDDEN, device="cuda", dtype=torch.float8_e4m3fn),
        torch.empty(tokens, device="cuda"),
    )
    world = len(peers.buffers)
    op = registry.get("all_reduce_norm", ReduceSpec(HIDDEN, world))
    fused = partial(op, peers, ours, weight, EPS, out, scale)
    barrier()
    fused()
    error = relative_error(ours, start.float() + total)
    us = timed(fused)
    separate, nccl = nccl_times(registry, x, start, weight, out, scale)
    limit = least_us(tokens, world) / us
    extra: dict[str, Any] = dict(nccl_alone=nccl, torch_one_shot=one_shot_time(peers, start, weight), error=error)
    return Figure(
        "all_reduce",
        dict(tokens=tokens, kbytes=tokens * HIDDEN * 2 // 1000, ranks=world),
        us,
        "us",
        limit,
        "NCCL, then norm",
        separate,
        extra,
    )


def least_us(tokens: int, world: int) -> float:
    """Return the microseconds that reading the other ranks' bf16 rows over NVLink once takes."""
    return tokens * HIDDEN * 2 * (world - 1) / NVLINK * 1e6


def nccl_times(
    registry: Registry, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, scale: Tensor
) -> tuple[float, float]:
    norm = registry.get("add_rmsnorm_quant", NormSpec(HIDDEN))
    work = x.clone()

    def both() -> None:
        dist.all_reduce(work)
        norm(work[None], residual, weight, EPS, out, scale)

    return timed(both), timed(lambda: dist.all_reduce(work))


def one_shot_time(peers: SymmetricMemory, residual: Tensor, weight: Tensor) -> float:
    own, name = peers.buffers[peers.rank], dist.group.WORLD.group_name

    def reduced(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return norm_quant(torch.ops.symm_mem.one_shot_all_reduce(x, "sum", name), residual, weight)

    run = compiled(reduced)
    barrier()
    run(own, residual, weight)
    return timed(lambda: run(own, residual, weight))


def timed(call: Any) -> float:
    def ten() -> None:
        for _ in range(10):
            call()

    graph = capture(ten)
    barrier()
    return replay_ms(graph, count=5, groups=5) * 100


def barrier() -> None:
    torch.cuda.synchronize()
    dist.barrier()


if __name__ == "__main__":
    main()
