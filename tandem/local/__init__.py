"""A whole system on this machine: what to start, on which ports and GPUs, and who watches it."""
