"""The benchmarks of the engine alone, on a CPU and on a GPU, beside its peers."""
