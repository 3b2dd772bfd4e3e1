"""The mode in which MKL multiplies float32 matrices, chosen before the first product."""

import os

from kernels.cpu.cpuinfo import cpu_lines

MKL_VARIABLE = "MKL_CBWR"
_BRANCHES = {"AVX512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "AVX2": {"avx2"}}
"""MKL's instruction sets that have a strict mode, the best first, and the flags of a CPU that has them."""


def keep_mkl_alike() -> None:
    """Have MKL compute a row to the bit alike in any batch, unless the operator has chosen a mode.

    On Intel's CPUs it takes other kernels for few rows than for many, and with some numbers of threads no small
    multiple of rows is always summed as others are. In its strict mode all numbers of rows are, and a lone row takes
    longer. On other makers' CPUs there is no such mode, and multiples of rows are alike
    (engine.cpu.linear.float32_multiple).
    """
    if "GenuineIntel" in cpu_lines("vendor_id"):
        flags = cpu_lines("flags").split()
        branch = next((name for name, needed in _BRANCHES.items() if needed <= set(flags)), None)
        if branch:
            os.environ.setdefault(MKL_VARIABLE, f"{branch},STRICT")
