"""Our own kernels in Triton and Gluon, for compute capability 9.0 to 12.0."""
