"""The CUDA runtime as the engine uses it: bindings, graph capture, pinned and shared memory, ranks."""
