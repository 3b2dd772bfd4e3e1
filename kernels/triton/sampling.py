# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""Sampling without a sort: thresholds by search over the order of all fp32, then the largest perturbed logit."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.specs import SampleSpec

# A value a row, from whichever row of a larger column on: every alignment would compile anew.
ROW_COLUMNS = [
    f"{name}_ptr" for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position", "token", "logprob")
]


@triton.jit
def key_to_float(key):
    """The fp32 whose place in the order of all fp32 is `key`; keys are unsigned and grow with the number. Before -inf
    there are NaNs only: -inf for them."""
    bits = (tl.maximum(key, 0x007FFFFF) - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def search(
    x_ptr,
    floor,
    top,
    inv_temperature,
    want,
    BY_MASS: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PASSES: tl.constexpr,
):
    """The largest t such that tokens with x >= max(t, floor) are `want` or more, counted or weighed by
    exp((x - top) / temperature). Two bits of t's key a pass, by three thresholds at once; ties with the last stay."""
    i = tl.arange(0, BLOCK)
    base = tl.zeros([], tl.int64)
    for digit in tl.static_range(PASSES):
        step = 1 << (30 - 2 * digit)
        t1 = key_to_float(base + step)
        t2 = key_to_float(base + step + step)  # the interpreter's steps are int32, and 2 * step is none
        t3 = key_to_float(base + step + step + step)
        n1 = tl.zeros([BLOCK], tl.float32)
        n2 = tl.zeros([BLOCK], tl.float32)
        n3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            x = tl.load(x_ptr + start + i, mask=start + i < V, other=float("-inf")).to(tl.float32)
            inside = (x >= floor) & (start + i < V)
            weight = tl.where(inside, tl.exp((x - top) * inv_temperature) if BY_MASS else 1.0, 0.0)
            n1 += tl.where(x >= t1, weight, 0.0)
            n2 += tl.where(x >= t2, weight, 0.0)
            n3 += tl.where(x >= t3, weight, 0.0)
        digits = (
            (tl.sum(n1, 0) >= want).to(tl.int64)
            + (tl.sum(n2, 0) >= want).to(tl.int64)
            + (tl.sum(n3, 0) >= want).to(tl.int64)
        )
        base += digits * step
    return key_to_float(base)


@triton.jit
def gumbel(bits):
    """As the reference's."""
    share = ((4294967295 - bits.to(tl.uint32, bitcast=True)).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    far = -tl.log(1.0 - tl.minimum(share, 0.999999940395355))
    return -tl.log(tl.where(share < 0.00390625, share + 0.5 * share * share, far))


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def sample_kernel(
    x_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, token_ptr, logprob_ptr,
    V: tl.constexpr, BLOCK: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * V
    i = tl.arange(0, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    random = temperature > 0
    inv_temperature = 1.0 / tl.where(random, temperature, 1.0)
    running = tl.full([BLOCK], -1.0e30, tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(x_ptr + start + i, mask=start + i < V, other=float("-inf")).to(tl.float32)
        bigger = tl.maximum(running, x)
        plain = plain * tl.exp(running - bigger) + tl.exp(x - bigger)
        running = bigger
    top = tl.max(running, 0)
    total = tl.sum(plain * tl.exp(running - top), 0)
    min_p = tl.load(min_p_ptr + row)
    floor = tl.where((min_p > 0) & random, top + tl.log(tl.maximum(min_p, 1e-30)) / inv_temperature, float("-inf"))
    keep = float("-inf")
    top_k = tl.load(top_k_ptr + row)
    if (top_k > 0) & (top_k < V) & random:
        keep = search(x_ptr, keep, top, inv_temperature, top_k.to(tl.float32), False, V, BLOCK, PASSES)
    keep = tl.maximum(keep, floor)  # before top-p, whose share is of what min-p and top-k leave
    top_p = tl.load(top_p_ptr + row)
    if (top_p < 1.0) & random:
        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            x = tl.load(x_ptr + start + i, mask=start + i < V, other=float("-inf")).to(tl.float32)
            mass += tl.where(x >= keep, tl.exp((x - top) * inv_temperature), 0.0)
        want = tl.maximum(top_p, 1e-30) * tl.sum(mass, 0)  # of 0 the search would find all, and end at NaN
        by_mass = search(x_ptr, keep, top, inv_temperature, want, True, V, BLOCK, PASSES)
        keep = tl.maximum(keep, by_mass)
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row).to(tl.int32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        x = tl.load(x_ptr + start + i, mask=start + i < V, other=float("-inf")).to(tl.float32)
        noisy = x
        if random:
            bits, _, _, _ = tl.philox(seed, start + i, position, 0, 0)
            noisy = (x - top) * inv_temperature + gumbel(bits)
        better = (x >= keep) & (start + i < V) & (noisy > best)
        best = tl.where(better, noisy, best)
        where = tl.where(better, start + i, where)
    winner = tl.max(best, 0)
    token = tl.min(tl.where(best == winner, where, V), 0)  # the lower index among equals
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, tl.load(x_ptr + token).to(tl.float32) - top - tl.log(total))


@triton.jit
def penalize_kernel(
    x_ptr, count_ptr, presence_ptr, frequency_ptr, repetition_ptr, V: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < V
    count = tl.load(count_ptr + row * V + col, mask=mask, other=0)
    x = tl.load(x_ptr + row * V + col, mask=mask, other=0.0).to(tl.float32)
    repetition = tl.load(repetition_ptr + row)
    x = tl.where(count > 0, tl.where(x > 0, x / repetition, x * repetition), x)
    x = x - tl.load(frequency_ptr + row) * count.to(tl.float32) - tl.where(count > 0, tl.load(presence_ptr + row), 0.0)
    tl.store(x_ptr + row * V + col, x.to(x_ptr.dtype.element_ty), mask=mask)


def sample(
    spec: SampleSpec, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor,
    positions: Tensor, tokens: Tensor, logprobs: Tensor,
) -> None:  # fmt: skip
    # the key of a bf16 has 16 bits, two of them a pass; fp32 has twice as many
    passes = 8 if logits.element_size() == 2 else 16
    sample_kernel[(logits.shape[0],)](
        logits, temperature, top_k, top_p, min_p, seeds, positions, tokens, logprobs,
        V=spec.vocab, BLOCK=min(8192, triton.next_power_of_2(spec.vocab)), PASSES=passes, num_warps=16,
    )  # fmt: skip


def penalize(
    spec: SampleSpec, logits: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> None:
    grid = (logits.shape[0], triton.cdiv(spec.vocab, 4096))
    penalize_kernel[grid](logits, counts, presence, frequency, repetition, V=spec.vocab, BLOCK=4096, num_warps=8)
