# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""One-shot all-reduce over NVLink with residual, norm and quantization in the same launch.

Each rank reads every peer's buffer and adds in rank order, so all ranks get the same bits. Meant for the few tokens of
a decode step: the bytes read grow with the number of ranks, and from some hundreds of kilobytes on NCCL is better.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.peers import MAX_CTAS, SymmetricMemory
from kernels.specs import ReduceSpec
from kernels.triton.common import to_e4m3, token_scale
from kernels.triton.norm import MODE


@triton.jit
def meet(flag_ptrs, rank, slot, epoch, WORLD: tl.constexpr):
    """Every rank's CTA `slot` waits for the same CTA of the others: it writes the epoch to each peer's row of flags and
    spins on its own. Flags only grow, so nothing has to be reset."""
    for peer in tl.static_range(WORLD):
        flags = tl.load(flag_ptrs + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + slot * WORLD + rank, epoch, sem="release", scope="sys")
    mine = tl.load(flag_ptrs + rank).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(WORLD):
        seen = tl.atomic_add(mine + slot * WORLD + peer, 0, sem="acquire", scope="sys")
        while seen - epoch < 0:
            seen = tl.atomic_add(mine + slot * WORLD + peer, 0, sem="acquire", scope="sys")


@triton.jit
def reduce_norm_kernel(
    buffer_ptrs, flag_ptrs, epoch_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, eps, rank, tokens,
    N: tl.constexpr, BLOCK: tl.constexpr, WORLD: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """CTAs take rows in turn. The epoch is on the device and grows by two a launch, so a captured graph replays."""
    slot = tl.program_id(0)
    epoch = tl.load(epoch_ptr + slot) + 1
    col = tl.arange(0, BLOCK)
    mask = col < N
    gain = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    meet(flag_ptrs, rank, slot, epoch, WORLD)
    tl.debug_barrier()
    for row in range(slot, tokens, tl.num_programs(0)):
        at = row * N + col
        value = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        for peer in tl.static_range(WORLD):
            source = tl.load(buffer_ptrs + peer).to(tl.pointer_type(tl.bfloat16))
            value += tl.load(source + at, mask=mask, other=0.0, cache_modifier=".cv").to(tl.float32)
        rounded = value.to(tl.bfloat16)
        tl.store(residual_ptr + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
        y = value * tl.rsqrt(tl.sum(value * value, 0) / N + eps) * gain
        if QUANT == 0:
            tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            if QUANT == 1:
                scale = token_scale(tl.max(tl.abs(y), 0))
                tl.store(scale_ptr + row, scale)
            else:
                scale = tl.load(scale_ptr)
            tl.store(out_ptr + at, to_e4m3(y / scale), mask=mask)
    tl.debug_barrier()
    meet(flag_ptrs, rank, slot, epoch + 1, WORLD)  # nobody overwrites its buffer while a peer still reads it
    tl.store(epoch_ptr + slot, epoch + 1)


def all_reduce_norm(
    spec: ReduceSpec, peers: SymmetricMemory, residual: Tensor, weight: Tensor, eps: float, out: Tensor, scale: Tensor
) -> None:
    """The same number of tokens on all ranks, at most as many as the buffers hold. Needs peer access, no multicast."""
    tokens = out.shape[0]
    reduce_norm_kernel[(min(tokens, MAX_CTAS),)](
        peers.buffer_ptrs, peers.flag_ptrs, peers.epoch, residual, weight, out, scale, eps, peers.rank, tokens,
        N=spec.hidden, BLOCK=triton.next_power_of_2(spec.hidden), WORLD=spec.world, QUANT=MODE[spec.quant],
        num_warps=16,
    )  # fmt: skip
