"""The engine's adapter for a GPU: the same scheduler, block pool and Engine over the kernel library's operations."""
