# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""Sampling without a sort, a program for each 4096 logits of a row.

A token's score is exp(x / temperature) by an exponential random number, and the best is drawn (Gumbel-max is the
logarithm of that). Top-p is asked afterwards: a token stays if those above it are less than top-p of the whole. If it
does not, nor does anything below, so the next is drawn from what is above it. At 0.95 that happens to a token in
twenty, and a row that has not ended after some rounds, one in tens of thousands, goes on by itself. Of a row with top-k
the few logits that may be among the k largest are copied together first: those that are no less than the k-th largest
of the maxima of 128 logits each. If they are too many, thresholds are searched for.
"""

import triton
import triton.language as tl
from torch import Tensor, float32, int32

from kernels.specs import SampleSpec
from kernels.triton.common import PDL, pdl_launch, pdl_start, pdl_wait
from kernels.workspace import (
    SAMPLE_BLOCK,
    SAMPLE_GROUPS,
    SAMPLE_ROUNDS,
    SAMPLE_SECTIONS,
    SAMPLE_SLOTS,
    sample_workspace_words,
)

# More rows than this fill the GPU with fewer programs, of so many blocks each.
_MANY_ROWS, _EACH = 32, 4
# A value a row, from whichever row of a larger column on: every alignment would compile anew.
ROW_COLUMNS = [
    f"{name}_ptr" for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position", "token", "logprob")
]
BLOCK, GROUPS, SLOTS = tl.constexpr(SAMPLE_BLOCK), tl.constexpr(SAMPLE_GROUPS), tl.constexpr(SAMPLE_SLOTS)
ROUNDS, SECTIONS = tl.constexpr(SAMPLE_ROUNDS), tl.constexpr(SAMPLE_SECTIONS)
# A row's scratch memory: sections of a word a block, three of them a round, then groups, values and tokens.
TOP, TOTAL, COUNT, MASS, BEST, TOKEN = (tl.constexpr(section) for section in range(6))


@triton.jit
def key_to_float(key):
    """The fp32 whose place in the order of all fp32 is `key`; keys are unsigned and grow with the number.

    Before -inf there are NaNs only: -inf for them.
    """
    bits = (tl.maximum(key, 0x007FFFFF) - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def logits_of(x_ptr, i, N):
    """-inf for NaN, and behind the end; the largest number for inf, less which it would be NaN."""
    x = tl.load(x_ptr + i, mask=i < N, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, tl.minimum(x, 3.4028234e38), float("-inf"))


@triton.jit
def search(
    x_ptr, floor, top, inv_temperature, want, BY_MASS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
    PASSES: tl.constexpr,
):  # fmt: skip
    """Return the threshold by which rows are cut.

    The largest t such that of N logits those >= max(t, floor) are `want` or more, counted or weighed by exp((x - top) /
    temperature). Two bits of t's key a pass, by three thresholds at once; ties with the last stay.
    """
    i = tl.arange(0, WIDTH)
    base = tl.zeros([], tl.int64)
    for digit in range(PASSES):
        step = (tl.zeros([], tl.int64) + 1073741824) >> (2 * digit)
        t1 = key_to_float(base + step)
        t2 = key_to_float(base + 2 * step)
        t3 = key_to_float(base + 3 * step)
        n1 = tl.zeros([WIDTH], tl.float32)
        n2 = tl.zeros([WIDTH], tl.float32)
        n3 = tl.zeros([WIDTH], tl.float32)
        for start in range(0, N, WIDTH):
            x = logits_of(x_ptr, start + i, N)
            inside = (x >= floor) & (start + i < N)
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
def exponential_noise(bits):
    """Exponential ones, of which the reference's Gumbel noise is -log."""
    share = ((4294967295 - bits.to(tl.uint32, bitcast=True)).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    far = -tl.log(1.0 - tl.minimum(share, 0.999999940395355))
    return tl.where(share < 0.00390625, share + 0.5 * share * share, far)


@triton.jit
def waits_from(start, seed, position):
    """Return the noise of BLOCK tokens.

    The four words of a counter are those of four tokens that follow each other.
    """
    a, b, c, d = tl.philox(seed, start // 4 + tl.arange(0, BLOCK // 4), position, 0, 0)
    return exponential_noise(tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK]))


@triton.jit
def waits_of(token, seed, position):
    a, b, c, d = tl.philox(seed, token // 4, position, 0, 0)
    word = token % 4
    return exponential_noise(tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d)))


@triton.jit
def section_of(room_ptr, section, other, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    block = tl.arange(0, PADDED)
    return tl.load(room_ptr + section * BLOCKS + block, mask=block < BLOCKS, other=other)


@triton.jit
def winner_of(room_ptr, index_ptr, round, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """The token that a round drew."""
    best = section_of(room_ptr, BEST + 3 * round, float("-inf"), BLOCKS, PADDED)
    _, block = tl.max(best, 0, return_indices=True)
    return tl.load(index_ptr + (TOKEN + 3 * round) * BLOCKS + block)


@triton.jit
def mass_of(room_ptr, round, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    return tl.sum(section_of(room_ptr, MASS + 3 * round, 0.0, BLOCKS, PADDED), 0)


@triton.jit
def wanted(top_p, mass):
    """What is above a token that stays is less than this.

    Above the likeliest there is nothing: it stays at 0, too, and in a row without any mass, where all would wait for
    another token else.
    """
    return tl.maximum(tl.maximum(top_p, 1e-30) * mass, 1e-30)


@triton.jit
def asked(temperature_ptr, top_k_ptr, V: tl.constexpr):
    """Return how a row is to be drawn.

    Whether it is drawn at random, 1 / temperature, top-k, and whether that leaves any token out.
    """
    temperature, top_k = tl.load(temperature_ptr), tl.load(top_k_ptr)
    random = temperature > 0
    return random, 1.0 / tl.where(random, temperature, 1.0), top_k, (top_k > 0) & (top_k < V) & random


@triton.jit
def floor_of(min_p, top, inv_temperature):
    return tl.where(min_p > 0, top + tl.log(tl.maximum(min_p, 1e-30)) / inv_temperature, float("-inf"))


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def peaks_kernel(
    x_ptr, top_k_ptr, room_ptr, V: tl.constexpr, BLOCKS: tl.constexpr, EACH: tl.constexpr, ROOM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What blocks bring to the row's top and total; the maxima of their groups where top-k is asked."""
    row = tl.program_id(0).to(tl.int64)
    pdl_start(PDL)
    pdl_wait(PDL)
    x_ptr, room_ptr = x_ptr + row * V, room_ptr + row * ROOM
    top_k = tl.load(top_k_ptr + row)
    counted = (top_k > 0) & (top_k < V)
    first = tl.program_id(1) * EACH
    for block in range(first, tl.minimum(first + EACH, BLOCKS)):
        x = logits_of(x_ptr, block * BLOCK + tl.arange(0, BLOCK), V)
        top = tl.max(x, 0)
        tl.store(room_ptr + TOP * BLOCKS + block, top)
        tl.store(room_ptr + TOTAL * BLOCKS + block, tl.sum(tl.exp(x - tl.maximum(top, -3e38)), 0))
        if counted:
            group = SECTIONS * BLOCKS + block * GROUPS + tl.arange(0, GROUPS)
            tl.store(room_ptr + group, tl.max(tl.reshape(x, [GROUPS, BLOCK // GROUPS]), 1))


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def round_kernel(
    x_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, room_ptr, index_ptr,
    V: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, ROOM: tl.constexpr, EACH: tl.constexpr,
    ROUND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find, of each block's tokens that may be drawn, their mass and the one with the best score.

    In the first round all that min-p leaves, and that may be among the top-k, which are copied together; later what is
    above the token of the round before, if that one is outside top-p.
    """
    row = tl.program_id(0).to(tl.int64)
    pdl_start(PDL)
    pdl_wait(PDL)
    x_ptr, room_ptr, index_ptr = x_ptr + row * V, room_ptr + row * ROOM, index_ptr + row * ROOM
    random, inv_temperature, top_k, counted = asked(temperature_ptr + row, top_k_ptr + row, V)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row).to(tl.int32)
    top = tl.max(section_of(room_ptr, TOP, float("-inf"), BLOCKS, PADDED), 0)
    if ROUND == 0:
        open = True
        bar = tl.where(random, floor_of(tl.load(min_p_ptr + row), top, inv_temperature), float("-inf"))
        if counted:
            groups_ptr = room_ptr + SECTIONS * BLOCKS
            least = search(
                groups_ptr, float("-inf"), top, 1.0, top_k.to(tl.float32), False, BLOCKS * GROUPS, PADDED * GROUPS, 8
            )
            bar = tl.maximum(bar, least)
    else:
        top_p = tl.load(top_p_ptr + row)
        open = random & (top_p < 1.0) & ((top_k <= 0) | (top_k >= V))
        want = wanted(top_p, mass_of(room_ptr, 0, BLOCKS, PADDED))
        for before in tl.static_range(1, ROUND):
            open = open & (mass_of(room_ptr, before, BLOCKS, PADDED) >= want)
        bar = float("-inf")
        if open:
            bar = tl.load(x_ptr + winner_of(room_ptr, index_ptr, ROUND - 1, BLOCKS, PADDED)).to(tl.float32)
    if open:
        first = tl.program_id(1) * EACH
        for block in range(first, tl.minimum(first + EACH, BLOCKS)):
            start = block * BLOCK
            mass, best, token, count = 0.0, float("-inf"), start, 0
            if tl.load(room_ptr + TOP * BLOCKS + block) >= bar:  # most blocks have nothing inside
                x = logits_of(x_ptr, start + tl.arange(0, BLOCK), V)
                inside = (x > float("-inf")) & ((x >= bar) if ROUND == 0 else (x > bar))
                mass, best, token = drawn(x, inside, top, inv_temperature, random, start, seed, position)
                if counted & (ROUND == 0):
                    count = copied(x, start + tl.arange(0, BLOCK), inside, room_ptr, index_ptr, block, BLOCKS)
            tl.store(room_ptr + (MASS + 3 * ROUND) * BLOCKS + block, mass)
            tl.store(room_ptr + (BEST + 3 * ROUND) * BLOCKS + block, best)
            tl.store(index_ptr + (TOKEN + 3 * ROUND) * BLOCKS + block, token)
            if ROUND == 0:
                tl.store(index_ptr + COUNT * BLOCKS + block, count)


@triton.jit
def copied(x, token, inside, room_ptr, index_ptr, block, BLOCKS: tl.constexpr):
    """How many of a block are `inside`.

    The first of them are stored with their tokens, as many as there are slots.
    """
    slot = tl.cumsum(inside.to(tl.int32), 0) - 1
    into = (SECTIONS + GROUPS) * BLOCKS + block * SLOTS + slot
    fits = inside & (slot < SLOTS)
    tl.store(room_ptr + into, x, mask=fits)
    tl.store(index_ptr + SLOTS * BLOCKS + into, token, mask=fits)
    return tl.sum(inside.to(tl.int32), 0)


@triton.jit
def drawn(x, inside, top, inv_temperature, random, start, seed, position):
    """Return of a block the mass of what is `inside`, and the best score of it with its token."""
    weight = tl.where(inside, tl.exp((x - top) * inv_temperature), 0.0)
    score = x
    if random:
        score = weight / waits_from(start, seed, position)
    best, at = tl.max(tl.where(inside, score, float("-inf")), 0, return_indices=True)
    return tl.sum(weight, 0), best, start + at


@triton.jit
def drawn_above(x_ptr, tops_ptr, bar, top, inv_temperature, seed, position, V: tl.constexpr, BLOCKS: tl.constexpr):
    """A round of one program: the mass of a row's logits above a bar, and the token drawn from them."""
    mass, best, token = 0.0, float("-inf"), 0
    for block in range(BLOCKS):
        if tl.load(tops_ptr + block) > bar:
            start = block * BLOCK
            x = logits_of(x_ptr, start + tl.arange(0, BLOCK), V)
            more, other, its_token = drawn(x, x > bar, top, inv_temperature, True, start, seed, position)
            mass += more
            token = tl.where(other > best, its_token, token)
            best = tl.maximum(best, other)
    return mass, token


@triton.jit
def draw(
    x_ptr, token_ptr, floor, top, inv_temperature, top_k, top_p, seed, position, LISTED: tl.constexpr, N: tl.constexpr,
    V: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """Draw by the thresholds of top-k and top-p, from N logits.

    All of a row, or those `LISTED` with their tokens.
    """
    least = search(x_ptr, float("-inf"), top, inv_temperature, top_k.to(tl.float32), False, N, BLOCK, PASSES)
    keep = tl.maximum(floor, least)
    i = tl.arange(0, BLOCK)
    if top_p < 1.0:  # behind the others: its share is of what they leave
        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            x = logits_of(x_ptr, start + i, N)
            mass += tl.where(x >= keep, tl.exp((x - top) * inv_temperature), 0.0)
        want = wanted(top_p, tl.sum(mass, 0))
        keep = tl.maximum(keep, search(x_ptr, keep, top, inv_temperature, want, True, N, BLOCK, PASSES))
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, N, BLOCK):
        x = logits_of(x_ptr, start + i, N)
        token = start + i
        if LISTED:
            token = tl.load(token_ptr + token, mask=(token < N) & (x > float("-inf")), other=0)
        score = tl.exp((x - top) * inv_temperature) / waits_of(token, seed, position)
        better = (x >= keep) & (score > best)
        best = tl.where(better, score, best)
        where = tl.where(better, token, where)
    return tl.min(tl.where(best == tl.max(best, 0), where, V), 0)  # the lower one among equals


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def settle_kernel(
    x_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, room_ptr, index_ptr, token_ptr,
    logprob_ptr, V: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, ROOM: tl.constexpr, PASSES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pdl_start(PDL)
    pdl_wait(PDL)
    x_ptr, room_ptr, index_ptr = x_ptr + row * V, room_ptr + row * ROOM, index_ptr + row * ROOM
    random, inv_temperature, top_k, counted = asked(temperature_ptr + row, top_k_ptr + row, V)
    top_p = tl.load(top_p_ptr + row)
    tops = section_of(room_ptr, TOP, float("-inf"), BLOCKS, PADDED)
    top = tl.max(tops, 0)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row).to(tl.int32)
    token = winner_of(room_ptr, index_ptr, 0, BLOCKS, PADDED)
    if counted:
        if tl.max(section_of(index_ptr, COUNT, 0, BLOCKS, PADDED), 0) > SLOTS:
            floor = floor_of(tl.load(min_p_ptr + row), top, inv_temperature)
            token = draw(
                x_ptr, index_ptr, floor, top, inv_temperature, top_k, top_p, seed, position, False, V, V, PASSES
            )  # fmt: skip
        else:
            slot = tl.arange(0, PADDED * SLOTS)
            count = tl.load(index_ptr + COUNT * BLOCKS + slot // SLOTS, mask=slot < BLOCKS * SLOTS, other=0)
            values_ptr = room_ptr + (SECTIONS + GROUPS) * BLOCKS
            x = tl.load(values_ptr + slot, mask=slot % SLOTS < count, other=float("-inf"))
            tl.store(values_ptr + slot, x, mask=slot < BLOCKS * SLOTS)
            tl.debug_barrier()
            tokens_ptr = index_ptr + (SECTIONS + GROUPS + SLOTS) * BLOCKS
            token = draw(
                values_ptr, tokens_ptr, float("-inf"), top, inv_temperature, top_k, top_p, seed, position,
                True, BLOCKS * SLOTS, V, PASSES,
            )  # fmt: skip
    elif random & (top_p < 1.0):
        want = wanted(top_p, mass_of(room_ptr, 0, BLOCKS, PADDED))
        open = True
        for round in tl.static_range(1, ROUNDS + 1):
            open = open & (mass_of(room_ptr, round, BLOCKS, PADDED) >= want)
            token = tl.where(open, winner_of(room_ptr, index_ptr, round, BLOCKS, PADDED), token)
        while open:
            bar = tl.load(x_ptr + token).to(tl.float32)
            mass, above = drawn_above(
                x_ptr, room_ptr + TOP * BLOCKS, bar, top, inv_temperature, seed, position, V, BLOCKS
            )  # fmt: skip
            open = mass >= want
            token = tl.where(open, above, token)
    totals = section_of(room_ptr, TOTAL, 0.0, BLOCKS, PADDED)
    total = tl.sum(totals * tl.exp(tops - tl.maximum(top, -3e38)), 0)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logprob_ptr + row, tl.load(x_ptr + token).to(tl.float32) - top - tl.log(total))


def sample(
    spec: SampleSpec, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor,
    positions: Tensor, tokens: Tensor, logprobs: Tensor, workspace: Tensor, *, pdl: bool = PDL,
) -> None:  # fmt: skip
    rows, blocks, room = len(logits), triton.cdiv(spec.vocab, SAMPLE_BLOCK), sample_workspace_words(spec)
    words = workspace[: rows * room * 4]
    asked = (logits, temperature, top_k, top_p, min_p, seeds, positions, words.view(float32), words.view(int32))
    shape = dict(V=spec.vocab, BLOCKS=blocks, PADDED=triton.next_power_of_2(blocks), ROOM=room)
    launch = dict(PDL=pdl, **pdl_launch(pdl))
    each = 1 if rows <= _MANY_ROWS else _EACH
    grid = (rows, triton.cdiv(blocks, each))
    peaks_kernel[grid](
        logits, top_k, words.view(float32), V=spec.vocab, BLOCKS=blocks, EACH=each, ROOM=room, num_warps=8, **launch
    )  # fmt: skip
    for number in range(SAMPLE_ROUNDS + 1):
        round_kernel[grid](*asked, **shape, EACH=each, ROUND=number, num_warps=8, **launch)
    # the key of a bf16 has 16 bits, two of them a pass; fp32 has twice as many
    passes = 8 if logits.element_size() == 2 else 16
    settle_kernel[(rows,)](*asked, tokens, logprobs, **shape, PASSES=passes, num_warps=16, **launch)
