"""The mode in which MKL multiplies float32 matrices, chosen before the first product."""

import os

from kernels.cpu.cpuinfo import cpu_lines

MKL_VARIABLE = "MKL_CBWR"


def keep_mkl_alike() -> None:
    """Have MKL compute a row to the bit alike in any batch, unless the operator has chosen a mode.

    On Intel's CPUs it takes other kernels for few rows than for many, and with two threads there was no multiple of
    rows up to 48 that is always summed as others are (MKL of torch 2.13). In its strict mode all numbers of rows are; a
    lone row takes as long as four then, others as before. On other makers' CPUs there is no such mode, and multiples of
    rows are alike (engine.cpu.linear.float32_multiple).
    """
    if "GenuineIntel" in cpu_lines("vendor_id"):
        branch = "AVX512" if "avx512f" in cpu_lines("flags") else "AVX2"
        os.environ.setdefault(MKL_VARIABLE, f"{branch},STRICT")
