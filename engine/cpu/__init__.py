"""The backend for a CPU: a runner over torch; for quantized files `native`, one over our C++ kernels."""
