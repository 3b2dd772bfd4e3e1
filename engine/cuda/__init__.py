"""The backend of an NVIDIA GPU, over the operations of the kernel library."""
