"""The most that an H200 reaches per second, which fractions of a limit are counted against.

All were measured on one card, in one run of which no file is kept: a read 4.497 TB/s, which is counted as 4.45 (a copy
4.287); FP8 matmul 1481 TFLOP/s with one scale a tensor, 1390 with one a row; bf16 matmul 835.
"""

from kernels.selfcheck import LIMITS

READ_RATE, FP8_TENSOR_RATE = LIMITS["NVIDIA H200"]
"""Bytes read, and FLOPs of FP8 products with one scale per tensor.

They are the limit of the library's operations (bench.kernels), whatever scales these have.
"""

FP8_ROW_RATE = 1.39e15
"""FLOPs of FP8 products with one scale per row, 6 % fewer.

The benchmarks of the whole engine (bench.engine.gpu*) count with it, and with half of it in bf16. Although many rows
are multiplied without scales now, at the higher rate above, they keep this limit so that their fractions can be
compared with those of earlier results.
"""

BF16_RATE = 0.835e15
"""FLOPs of bf16 products: the limit of the library's operations that multiply in bf16."""
