"""What an H200 reaches at most, a second: what kernels' and engines' fractions of the byte or FLOP limit are of.

All were measured on one card, in one run of which no file is kept: a read 4.497 TB/s, which is counted as 4.45 (a copy
4.287); FP8 matmul 1481 TFLOP/s with one scale a tensor, 1390 with one a row; bf16 matmul 835.
"""

from kernels.selfcheck import LIMITS

READ_RATE, FP8_TENSOR_RATE = LIMITS["NVIDIA H200"]
"""Bytes read, and FLOPs of FP8 products with one scale a tensor: the limit of the library's operations (bench.kernels),
whatever their scales are."""

FP8_ROW_RATE = 1.39e15
"""FLOPs of FP8 products with one scale a row, 6 % fewer: what the whole engine's benchmarks (bench.engine.gpu*) count
with, half of it in bf16. Many rows are multiplied without scales by now, at the rate above; of that one their fractions
would be 6 % smaller. They keep this one, to be compared with earlier results."""

BF16_RATE = 0.835e15
"""FLOPs of bf16 products: the limit of the library's operations that multiply in bf16."""
