"""Random products and steps of the native kernels beside their reference in numpy.

`python -m tests.kernels.fuzz_native [--seconds 60] [--seed 0]`

Each case has a seed of its own, which is printed where it fails: `--seed N --seconds 0` runs it alone. A case takes an
instruction set that this CPU has, up to TANDEM_CPU_KERNELS, and a number of threads. Products of quantized matrices are
computed with the others too, which must give the same bits.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence

import numpy as np
from gguf import GGML_QUANT_SIZES

from kernels.cpu.native import KINDS, LEVEL_VARIABLE, LEVELS, NativeKernels, NativeMatrix, load_kernels
from tests.kernels.native_steps import check_step
from tests.kernels.test_native import ROUNDED, dense, rounded, stored

MOST_THREADS = 5
_TOLERANCE = 4e-6
"""The error of a product, of the sum of its terms' magnitudes: float32 sums up to 2048 terms."""


def main() -> int:
    """Run cases until the time is over; return 1 at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    kernels, seed, ends = load_kernels(), args.seed, time.monotonic() + args.seconds
    while seed == args.seed or time.monotonic() < ends:
        try:
            run_case(kernels, seed)
        except AssertionError as error:
            print(f"seed {seed}: {error}", file=sys.stderr)
            return 1
        seed += 1
    print(f"{seed - args.seed} cases from seed {args.seed} on, none at fault")
    return 0


def run_case(kernels: NativeKernels, seed: int) -> None:
    """Run the case of a seed. Raises AssertionError for a result that is not the reference's."""
    rng = np.random.default_rng(seed)
    best = os.environ.get(LEVEL_VARIABLE) or kernels.best_level
    levels = LEVELS[: LEVELS.index(best) + 1]
    level = kernels.set_level(str(rng.choice(levels)))
    threads = int(rng.integers(1, MOST_THREADS + 1))
    kernels.set_threads(threads)
    try:
        if rng.random() < 0.6:
            check_product(kernels, rng, levels)
        else:
            check_step(kernels, rng)
    except AssertionError as error:
        raise AssertionError(f"{level}, {threads} threads: {error}") from error
    finally:
        kernels.set_level(best)


def check_product(kernels: NativeKernels, rng: np.random.Generator, levels: Sequence[str]) -> None:
    """Multiply random rows by a random matrix: all at once, some by themselves, with each instruction set."""
    kind = sorted(KINDS)[rng.integers(len(KINDS))]
    block, _ = GGML_QUANT_SIZES[kind]
    n, k = int(rng.integers(1, 150)), max(block, 32) * int(rng.integers(1, 1 + 2048 // max(block, 32)))
    num_rows = int(rng.integers(1, 65)) if rng.random() < 0.8 else int(rng.integers(65, 160))
    rows, x = stored(kind.name, n, k, int(rng.integers(1 << 30))), random_rows(rng, num_rows, k)
    bias = rng.standard_normal(n, np.float32) if rng.random() < 0.3 else None
    words = f"{kind.name} [{n}, {k}], {num_rows} rows"
    matrix = tight(kernels.pack(kind, rows, bias))
    found, weight = kernels.linear(matrix, x), dense(kind.name, rows).astype(np.float64)
    seen = (rounded(x) if kind.name in ROUNDED else x).astype(np.float64)
    added = 0.0 if bias is None else bias
    room = _TOLERANCE * (np.abs(seen) @ np.abs(weight).T + np.abs(added)) + 1e-30
    error = np.abs(found - (seen @ weight.T + added)) / room
    assert error.max() <= 1.0, f"{words}: wrong by {error.max():.3g} times what rounding explains"
    first = int(rng.integers(num_rows))
    some = slice(first, first + int(rng.integers(1, num_rows - first + 1)))
    assert np.array_equal(kernels.linear(matrix, x[some].copy()), found[some]), f"{words}: {some} has other bits alone"
    for level in levels if kind.name in ROUNDED else ():
        kernels.set_level(level)
        assert np.array_equal(kernels.linear(matrix, x), found), f"{words}: {level} has other bits"


def random_rows(rng: np.random.Generator, num_rows: int, k: int) -> np.ndarray:
    """Activations of any size, some with few large ones among small, some all zero."""
    x = rng.standard_normal((num_rows, k), np.float32) * np.float32(10.0 ** rng.integers(-12, 9))
    x[rng.random(x.shape) < 0.01] *= 100
    x[rng.random(num_rows) < 0.1] = 0
    return x


def tight(matrix: NativeMatrix) -> NativeMatrix:
    """Return a matrix whose arrays end where their allocations do, so that a sanitizer sees what is read behind."""
    arrays = tuple(array.copy() for array in matrix.arrays)
    matrix.struct.codes, matrix.struct.scales = (array.ctypes.data for array in arrays[:2])
    if len(arrays) > 2:
        matrix.struct.bias = arrays[2].ctypes.data
    return NativeMatrix(matrix.struct, arrays)


if __name__ == "__main__":
    sys.exit(main())
