"""Linear layers in each number format: near the exact product, and a row's result its own to the bit."""

import pytest
import torch

from engine.cpu.linear import (
    FORMATS,
    BFloat16Linear,
    BFloat16PromptLinear,
    Float16Linear,
    Float32Linear,
    Int4Linear,
    Int8Linear,
    PhasedLinear,
    int4_grid,
    pack_int4_if_exact,
    part_sizes,
)
from kernels.cpu.isa import apply_isa, probe_isa
from tests.engine.driving import needs_bfloat16

# Relative error of one product of 576 terms, in the root mean square: half a unit in the last place of the weights'
# format, times a little for the rows' own rounding. int8: one scale a row of weights that are normal, so 4.5 sigma
# fill 127 steps.
TOLERANCES = {Float32Linear: 1e-6, Float16Linear: 4e-4, BFloat16Linear: 4e-3, Int8Linear: 1.2e-2}
KINDS = [
    pytest.param(kind, id=kind.__name__, marks=needs_bfloat16 if kind is BFloat16Linear else ()) for kind in TOLERANCES
]
WIDTH = 576


@pytest.fixture(scope="module", autouse=True)
def sound_isa(tmp_path_factory):
    apply_isa(probe_isa(tmp_path_factory.mktemp("cache")))


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("num_rows", [1, 3, 33, 100, 513])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_near_the_exact_product(kind, has_bias, num_rows):
    x, weight = matrix(num_rows, WIDTH, 1), matrix(96, WIDTH, 2)
    bias = matrix(1, 96, 3)[0] if has_bias else None
    y = kind(weight, bias)(x)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert y.shape == exact.shape
    assert relative_error(y, exact) < TOLERANCES[kind]


@pytest.mark.parametrize("num_out", [192, 3072])
@pytest.mark.parametrize(
    "kind",
    [
        Float16Linear,
        pytest.param(BFloat16Linear, marks=needs_bfloat16),
        pytest.param(BFloat16PromptLinear, marks=needs_bfloat16),
    ],
)
def test_a_row_is_the_same_to_the_bit_in_any_company(kind, num_out):
    linear = kind(matrix(num_out, WIDTH, 2), None)
    assert_rows_keep_their_bits(linear)


def test_a_row_of_int4_is_the_same_to_the_bit_in_any_company():
    assert_rows_keep_their_bits(pack_int4_if_exact(on_grid(192, WIDTH), None))


def test_a_row_of_float16_is_the_same_to_the_bit_among_few():
    """fbgemm sums the last one or two rows of many numbers otherwise where it has no AVX-512."""
    spans = [(first, first + count) for first in (0, 5) for count in range(1, 120)]
    assert_rows_keep_their_bits(Float16Linear(matrix(192, WIDTH, 2), None), spans)


@needs_bfloat16
@pytest.mark.parametrize("kind", [BFloat16Linear, BFloat16PromptLinear])
def test_a_row_of_bfloat16_is_the_same_to_the_bit_in_a_large_product(kind):
    """oneDNN sums many rows in other orders than few where it has AMX, and in yet others where the product is large."""
    linear, x = kind(matrix(2048, 4096, 3), None), matrix(400, 4096, 4)
    everything = linear(x)
    for first, last in [(0, 20), (7, 55), (10, 138), (0, 257), (100, 400)]:
        assert torch.equal(linear(x[first:last]), everything[first:last])


@needs_bfloat16
@pytest.mark.parametrize("kind", [BFloat16Linear, BFloat16PromptLinear])
def test_a_lone_row_of_bfloat16_is_the_same_to_the_bit(kind):
    """oneDNN sums it otherwise, which shows in one of two products of this size."""
    linear, x = kind(matrix(2048, 2048, 3), None), matrix(64, 2048, 4)
    everything = linear(x)
    assert all(torch.equal(linear(x[row : row + 1]), everything[row : row + 1]) for row in range(16))


def assert_rows_keep_their_bits(linear, spans=()):
    x = matrix(700, WIDTH, 1)
    everything = linear(x)
    for first, last in [*spans, (0, 64), (64, 164), (100, 700), (300, 813)]:
        assert torch.equal(linear(x[first:last]), everything[first:last])


@pytest.mark.parametrize("sizes", [(2, 4, 8, 16, 32, 64, 128, 256, 512), (64, 128, 256, 512), (2, 4, 8), (512,)])
def test_parts_hold_all_rows_and_little_else(sizes):
    assert part_sizes(0, sizes) == [sizes[0]]
    for num_rows in range(1, 1500):
        parts = part_sizes(num_rows, sizes)
        assert set(parts) <= set(sizes)
        assert 0 <= sum(parts) - num_rows < max(sizes[0], min(parts[-1], 32))


def test_an_int8_row_of_zeros_stays_zero():
    weight = matrix(32, WIDTH)
    weight[5] = 0
    y = Int8Linear(weight, None)(matrix(4, WIDTH, 1))
    assert torch.equal(y[:, 5], torch.zeros(4, dtype=y.dtype))
    assert y.isfinite().all()


@pytest.mark.parametrize("width", [100, 104])
@pytest.mark.parametrize("num_rows", [1, 5, 33])
def test_int8_is_near_the_exact_product_at_widths_that_its_kernel_does_not_take(num_rows, width):
    x, weight = matrix(num_rows, width, 1), matrix(96, width, 2)
    assert relative_error(Int8Linear(weight, None)(x), x.double() @ weight.double().T) < TOLERANCES[Int8Linear]


def test_phases_take_their_own_format_and_answers_come_first():
    linear = PhasedLinear(prompt=lambda x: x + 1, answer=lambda x: x - 1)
    x = torch.zeros(5, 1)
    assert linear(x, 2).flatten().tolist() == [-1, -1, 1, 1, 1]
    assert linear(x, 0).flatten().tolist() == [1] * 5
    assert linear(x, 5).flatten().tolist() == [-1] * 5


@pytest.mark.parametrize(
    ("name", "is_uniform"),
    [
        ("float32", True),
        pytest.param("mixed16", False, marks=needs_bfloat16),
        pytest.param("mixed4", False, marks=needs_bfloat16),
        ("int4", True),
        ("int8", False),
    ],
)
def test_a_format_packs_one_or_two_linears(name, is_uniform):
    packed = FORMATS[name].pack(matrix(64, WIDTH))  # on no grid: int4 holds it in float16, once
    assert packed.is_uniform == is_uniform
    assert packed(matrix(4, WIDTH), 2).shape == (4, 64)


def on_grid(rows: int, columns: int) -> torch.Tensor:
    """Weights as a GGUF file in Q4_1 holds them: 16 even steps, both ends of which are taken in each group of 32."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (rows, columns // 32, 32), generator=generator).float()
    codes[..., 3], codes[..., 17] = 0, 15
    scales = torch.rand(rows, columns // 32, 1, generator=generator) * 0.01 + 1e-3
    return ((codes - 7) * scales.half().float()).view(rows, columns)


def test_weights_on_an_int4_grid_are_found_again_to_the_code():
    weight = on_grid(96, WIDTH)
    grid = int4_grid(weight)
    assert grid is not None
    again = grid.codes.view(96, -1, 32) * grid.scales[..., None] + grid.least[..., None]
    torch.testing.assert_close(again.view(96, WIDTH), weight, rtol=0, atol=1e-7)


@pytest.mark.parametrize("has_bias", [False, True])
def test_int4_is_as_near_as_bfloat16_on_weights_of_its_grid(has_bias):
    x, weight = matrix(33, WIDTH, 1), on_grid(96, WIDTH)
    bias = matrix(1, 96, 3)[0] if has_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert relative_error(pack_int4_if_exact(weight, bias)(x).double(), exact) < TOLERANCES[BFloat16Linear]


@pytest.mark.parametrize("weight", [matrix(96, WIDTH), matrix(96, 100), on_grid(40, WIDTH)])
def test_weights_that_int4_would_change_or_cannot_hold_stay_float16(weight):
    assert int4_grid(weight) is None
    assert isinstance(pack_int4_if_exact(weight, None), Float16Linear)


def test_equal_weights_are_on_every_grid():
    weight = torch.full((16, 32), 0.25)
    assert isinstance(pack_int4_if_exact(weight, None), Int4Linear)
    assert torch.equal(pack_int4_if_exact(weight, None)(torch.ones(1, 32)).float(), torch.full((1, 16), 8.0))
