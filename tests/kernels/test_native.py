"""The native kernels: each format of GGUF beside the gguf package's own values, and rows that keep their bits."""

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels.cpu.native import KINDS, LEVELS, NativeKernels, load_kernels

HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0]}
HALVES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
"""The bytes of a block at which float16 numbers stand."""
PLAIN = {"F32": np.float32, "F16": np.float16}
ROUNDED = sorted(kind.name for kind in KINDS - {GGMLQuantizationType[name] for name in ("F32", "F16", "BF16")})

LEAST_PEAK = np.float32(2.0**-120)
"""Columns of a group that are all smaller are taken as zero."""


@pytest.fixture(scope="module")
def kernels():
    library = load_kernels()
    library.set_threads(2)
    yield library
    library.set_level(library.best_level)


@pytest.fixture(params=LEVELS)
def level(request, kernels: NativeKernels):
    """Each instruction set that this CPU has."""
    if kernels.set_level(request.param) != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    kernels.set_level(kernels.best_level)


def stored(name: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Random blocks: any codes, scales that are numbers. Values are of the order of 0.01 to 1."""
    rng = np.random.default_rng(seed)
    if name == "BF16":
        return gguf.quantize(rng.standard_normal((n, k), np.float32), GGMLQuantizationType.BF16).view(np.uint8)
    if name in PLAIN:
        return rng.standard_normal((n, k)).astype(PLAIN[name]).view(np.uint8)
    block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (n, k // block, nbytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = rng.integers(118, 130, blocks.shape[:2])
    for at in HALVES.get(name, ()):
        numbers = (rng.standard_normal(blocks.shape[:2]) * 0.01).astype(np.float16)
        blocks[..., at : at + 2] = numbers[..., None].view(np.uint8)
    return blocks.reshape(n, -1)


def dense(name: str, rows: np.ndarray) -> np.ndarray:
    return gguf.dequantize(rows, GGMLQuantizationType[name]).astype(np.float32).reshape(len(rows), -1)


def rounded(x: np.ndarray) -> np.ndarray:
    """Rows as the kernels see them, float64: int8, 32 columns at a time, the coarsest quarter of the groups twice."""
    groups = x.reshape(len(x), -1, 32)
    once = in_int8(groups)
    rests = in_int8((groups - once).astype(np.float32))
    return (once + np.where(is_coarse(groups)[..., None], rests, 0)).reshape(x.shape)


def is_coarse(groups: np.ndarray) -> np.ndarray:
    """Which groups `[rows, groups]` are rounded twice: of each 64, those of the greatest scales."""
    scales = np.abs(groups).max(2) / np.float32(127)
    chosen = np.zeros(scales.shape, bool)
    for row, marks in zip(scales, chosen, strict=True):
        for first in range(0, len(row), 64):
            some = row[first : first + 64]
            count = -(-len(some) // 4)
            values = np.unique(some[some > 0])[-count:]
            if len(values):
                marks[first + np.flatnonzero(some >= values[0])[:count]] = True
    return chosen


def in_int8(groups: np.ndarray) -> np.ndarray:
    peaks = np.abs(groups).max(2, keepdims=True)
    inverse = np.divide(np.float32(127), peaks, out=np.zeros_like(peaks), where=peaks >= LEAST_PEAK)
    return np.rint(groups * inverse).astype(np.float64) * (peaks / np.float32(127))


def activations(num_rows: int, k: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, k), np.float32)


def relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("kind", sorted(kind.name for kind in KINDS))
def test_widened_values_are_those_of_the_gguf_package(kernels, level, kind):
    rows = stored(kind, 5, 512)
    np.testing.assert_allclose(kernels.widen(GGMLQuantizationType[kind], rows), dense(kind, rows), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", sorted(kind.name for kind in KINDS))
@pytest.mark.parametrize(("n", "k"), [(16, 256), (5, 512), (41, 768), (7, 2304)])
def test_products_are_those_of_the_values(kernels, level, kind, n, k):
    rows, x = stored(kind, n, k), activations(70, k)
    x[3] = 0
    seen = rounded(x) if kind in ROUNDED else x
    exact = seen.astype(np.float64) @ dense(kind, rows).T.astype(np.float64)
    matrix = kernels.pack(GGMLQuantizationType[kind], rows)
    found = kernels.linear(matrix, x)
    assert relative_error(found, exact) < 2e-6
    assert not found[3].any()


@pytest.mark.parametrize("kind", ROUNDED)
def test_odd_numbers_of_groups(kernels, level, kind):
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rows, x = stored(kind, 17, 3 * block), activations(3, 3 * block)
    exact = rounded(x).astype(np.float64) @ dense(kind, rows).T
    assert relative_error(kernels.linear(kernels.pack(GGMLQuantizationType[kind], rows), x), exact) < 2e-6


@pytest.mark.parametrize("kind", sorted(kind.name for kind in KINDS))
def test_a_row_is_the_same_to_the_bit_in_any_company_and_with_any_threads(kernels, level, kind):
    matrix, x = kernels.pack(GGMLQuantizationType[kind], stored(kind, 72, 512)), activations(130, 512)
    everything = kernels.linear(matrix, x)
    for threads in (1, 3, 2):
        kernels.set_threads(threads)
        for first, last in [*((5, 5 + count) for count in range(1, 19)), (0, 64), (7, 130)]:
            np.testing.assert_array_equal(kernels.linear(matrix, x[first:last]), everything[first:last])


@pytest.mark.parametrize("kind", sorted(kind.name for kind in KINDS))
def test_all_instruction_sets_give_the_same_bits(kernels, kind):
    """Without AVX2, sums of floats are rounded twice where the others do once: of these there is no one result."""
    matrix, x = kernels.pack(GGMLQuantizationType[kind], stored(kind, 40, 512)), activations(300, 512)
    found = {level: kernels.linear(matrix, x) for level in LEVELS if kernels.set_level(level) == level}
    kernels.set_level(kernels.best_level)
    alike = [found[level] for level in found if level != "plain" or kind in ROUNDED]
    if len(alike) < 2:
        pytest.skip("this CPU has one of them")
    for other in alike[1:]:
        np.testing.assert_array_equal(other, alike[0])


def test_extreme_codes_do_not_saturate(kernels, level):
    """All codes at their ends, and activations at theirs: what sums in 16 bits would lose."""
    for kind in ROUNDED:
        rows = stored(kind, 16, 512)
        blocks = rows.reshape(16, -1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1])
        starts = {
            "Q8_0": 2,
            "Q4_0": 2,
            "IQ4_NL": 2,
            "MXFP4": 1,
            "Q4_1": 4,
            "Q5_0": 2,
            "Q5_1": 4,
            "Q4_K": 16,
            "Q5_K": 16,
        }
        for value in (0x00, 0x80, 0xFF, 0x7F):
            blocks[..., starts.get(kind, 0) : 192 if kind == "Q6_K" else None] = value
            x = np.where(np.arange(512) % 3 == 0, -1, 1).astype(np.float32)[None].repeat(2, 0)
            exact = x.astype(np.float64) @ dense(kind, rows).T
            found = kernels.linear(kernels.pack(GGMLQuantizationType[kind], rows), x)
            np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-4 * max(1, np.abs(exact).max()))


@pytest.mark.parametrize("kind", ROUNDED)
def test_activations_too_small_for_a_scale_are_taken_as_zero(kernels, level, kind):
    """A group's columns, and what their rounding left of larger ones: 127 over either is infinite in float32."""
    rows, x = stored(kind, 16, 512), activations(2, 512)
    matrix = kernels.pack(GGMLQuantizationType[kind], rows)
    for size in (1e-37, 1e-38, 1e-42):
        assert not kernels.linear(matrix, x * np.float32(size)).any()
    small = x * np.float32(1e-35)
    exact = rounded(small) @ dense(kind, rows).T.astype(np.float64)
    assert relative_error(kernels.linear(matrix, small), exact) < 2e-5


def test_a_bias_is_added(kernels, level):
    rows, x, bias = stored("Q8_0", 21, 64), activations(5, 64), activations(1, 21, 3)[0]
    without = kernels.linear(kernels.pack(GGMLQuantizationType.Q8_0, rows), x)
    found = kernels.linear(kernels.pack(GGMLQuantizationType.Q8_0, rows, bias), x)
    np.testing.assert_array_equal(found, without + bias)


def test_packed_matrices_are_no_larger_than_their_blocks(kernels):
    for kind in ROUNDED:
        rows = stored(kind, 64, 1024)
        assert kernels.pack(GGMLQuantizationType[kind], rows).nbytes <= rows.nbytes * 1.03, kind


@pytest.mark.parametrize(
    ("kind", "rows", "words"),
    [
        ("Q2_K", np.zeros((2, 84), np.uint8), "Q2_K has no native kernel"),
        ("Q8_0", np.zeros((2, 33), np.uint8), "blocks of 34 bytes"),
        ("Q8_0", np.zeros((2, 34), np.int8), "int8"),
        ("F32", np.zeros((2, 40), np.uint8), "multiples of 32"),
    ],
)
def test_what_cannot_be_packed_is_refused(kernels, kind, rows, words):
    with pytest.raises(ValueError, match=words):
        kernels.pack(GGMLQuantizationType[kind], rows)


def test_rows_of_another_width_are_refused(kernels):
    matrix = kernels.pack(GGMLQuantizationType.Q8_0, stored("Q8_0", 16, 64))
    with pytest.raises(ValueError, match="64 columns"):
        kernels.linear(matrix, activations(2, 32))
