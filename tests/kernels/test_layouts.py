"""Weight layouts survive the round trip, and the 4-bit number formats are the ones of the specifications."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import layouts
from kernels.reference import quant
from kernels.reference.gemm import dequantize_w4

CODES = torch.arange(16)


@given(
    st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 5), st.booleans(),
    st.sampled_from([torch.float16, torch.bfloat16]),
)  # fmt: skip
@settings(max_examples=20)
def test_tiles_of_int4_hold_every_code_scale_and_zero(seed, strips, blocks, is_row, dtype):
    make, groups = torch.Generator().manual_seed(seed), 1 if is_row else blocks
    codes = torch.randint(0, 16, (64 * strips, 128 * blocks), generator=make)
    scale = torch.randn(64 * strips, groups, generator=make).to(dtype)
    zero = torch.randint(0, 16, scale.shape, generator=make)
    words, factors = layouts.tile_int4(codes, scale, zero)
    assert words.shape == (strips, blocks, 64, 32) and factors.shape == (strips, -(-blocks // 2), 64, 2)
    found, scales, zeros = layouts.untile_int4(words, factors)
    assert torch.equal(found.long(), codes)
    assert torch.equal(scales, scale.float().expand(-1, blocks)) and torch.equal(zeros.long(), zero.expand(-1, blocks))


def test_scales_of_float32_are_kept_to_a_millionth():
    scale = torch.rand(64, 1) + 0.01
    _, found, _ = layouts.untile_int4(*layouts.tile_int4(torch.zeros(64, 128), scale, torch.full((64, 1), 15)))
    assert torch.allclose(found, scale, rtol=2**-20, atol=0)


def gptq(codes_NK, zero_NG):
    """A checkpoint as GPTQModel writes version 1: int32 [k / 8, n] and zeros less one, [groups, n / 8], a zero of 0
    borrowing from the next of its word.
    """
    shifts = 4 * torch.arange(8, dtype=torch.int64)
    k_words = (codes_NK.t().reshape(-1, 8, codes_NK.shape[0]).long() << shifts[:, None]).sum(1)
    z_words = ((zero_NG.t() - 1).reshape(zero_NG.shape[1], -1, 8).long() << shifts).sum(-1)
    return as_int32(k_words), as_int32(z_words)


def awq(codes_NK, zero_NG):
    """The same as AWQ writes it: int32 [k, n / 8], column j of eight in nibble AWQ_ORDER[j]."""
    shifts = 4 * torch.tensor(layouts.AWQ_ORDER)
    pack = [(x.t().reshape(x.shape[1], -1, 8).long() << shifts).sum(-1) for x in (codes_NK, zero_NG)]
    return as_int32(pack[0]), as_int32(pack[1])


def as_int32(x):
    return torch.where(x > 2**31 - 1, x - 2**32, x).to(torch.int32)


@pytest.mark.parametrize(("pack", "load"), [(gptq, layouts.from_gptq), (awq, layouts.from_awq)])
def test_int4_checkpoints_dequantize_to_the_same_weights(pack, load):
    n, k, group = 64, 256, 128
    codes, zero = torch.randint(0, 16, (n, k)), torch.randint(0, 16, (n, k // group))
    scale = torch.rand(n, k // group)
    qweight, qzeros = pack(codes, zero)
    found, scales, zeros = load(qweight, qzeros, scale.t().contiguous())
    assert torch.equal(found.long(), codes)
    want = ((codes.view(n, -1, group) - zero[..., None]) * scale[..., None]).view(n, k)
    assert torch.allclose(dequantize_w4(*layouts.tile_int4(found, scales, zeros)), want)


def test_e2m1_has_the_values_of_the_specification():
    values = quant.e2m1_values(CODES).tolist()
    assert values == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@given(st.floats(-8, 8))
def test_packing_picks_the_nearest_e2m1_value_and_even_on_ties(x):
    got = quant.unpack_e2m1(quant.pack_e2m1(torch.tensor([x, 0.0])))[0].item()
    nearest = min(abs(x - v) for v in quant.e2m1_values(CODES).tolist())
    assert abs(x - got) == pytest.approx(nearest, abs=1e-6)


@pytest.mark.parametrize(
    ("x", "want"), [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0), (9.0, 6.0)]
)
def test_ties_go_to_the_even_code(x, want):
    assert quant.unpack_e2m1(quant.pack_e2m1(torch.tensor([x, -x]))).tolist() == [want, -want]


def test_mxfp4_rounds_within_half_a_step():
    w = torch.randn(16, 256)
    packed, exponents = quant.quantize_mxfp4(w)
    error = quant.mxfp4_values(quant.codes_of_pairs(packed), exponents) - w
    assert error.norm() / w.norm() < 0.16


@pytest.mark.parametrize("shape", [(6, 4), (3, 10, 8), (2, 2)])
def test_gates_come_before_ups(shape):
    rows = torch.arange(torch.Size(shape).numel()).view(shape)
    halves = layouts.gate_up_halves(rows)
    middle = shape[-2] // 2
    for i in range(middle):
        assert torch.equal(halves[..., i, :], rows[..., 2 * i, :])
        assert torch.equal(halves[..., middle + i, :], rows[..., 2 * i + 1, :])


def test_biases_are_reordered_like_their_rows():
    assert layouts.gate_up_halves(torch.tensor([[1, 2, 3, 4]]), -1).tolist() == [[1, 3, 2, 4]]


def test_the_packed_widening_of_e2m1_is_exact_for_every_code_and_exponent():
    """The kernel's bit moves, in torch: a code's bits in a bf16 are its value times 2^-126, the scale does the rest."""
    codes = CODES.to(torch.int32)
    bits = ((codes & 7) << 6) | ((codes & 8) << 12)
    moved = bits.to(torch.int16).view(torch.bfloat16)
    for exponent in (64, 120, 127, 130, 190):
        scale = torch.tensor([(exponent + 63) << 7], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        got = (moved.double() * scale.double()).to(torch.bfloat16).double() * 2.0**63
        assert torch.equal(got, quant.e2m1_values(CODES).double() * 2.0 ** (exponent - 127))


def test_the_packed_widening_of_int4_is_exact_before_its_scale():
    bits = torch.tensor([0x4300 | code for code in range(16)], dtype=torch.int16)
    for zero in range(16):
        got = bits.view(torch.bfloat16) - torch.tensor([128.0 + zero]).bfloat16()
        assert got.tolist() == [code - zero for code in range(16)]


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 5))
def test_tiles_of_mxfp4_hold_every_code_and_exponent(seed, strips, blocks):
    make = torch.Generator().manual_seed(seed)
    shape = (2, 64 * strips, 32 * blocks)
    packed = torch.randint(256, shape, generator=make, dtype=torch.uint8)
    exponents = torch.randint(192, (2, 64 * strips, 2 * blocks), generator=make, dtype=torch.uint8)
    words, scales = layouts.tile_mxfp4(packed, exponents)
    assert words.shape == (2, strips, blocks, 64, 16) and scales.shape == (2, strips, -(-blocks // 2), 64, 2)
    codes, found = layouts.untile_mxfp4(words, scales)
    assert torch.equal(codes, torch.stack([packed & 15, packed >> 4], -1).flatten(-2))
    assert torch.equal(found, exponents)


def test_the_largest_exponents_of_mxfp4_saturate_where_a_bf16_ends():
    packed, exponents = torch.zeros(64, 32, dtype=torch.uint8), torch.full((64, 2), 255, dtype=torch.uint8)
    assert layouts.untile_mxfp4(*layouts.tile_mxfp4(packed, exponents))[1].unique().tolist() == [191]


def test_gates_and_their_ups_come_eight_by_eight_and_go_back():
    rows = torch.arange(48)[:, None].expand(48, 2)
    paired = layouts.pair_gate_up(rows)
    assert paired[:, 0].tolist()[:24] == [*range(8), *range(24, 32), *range(8, 16)]
    assert torch.equal(layouts.unpair_gate_up(paired), rows)
