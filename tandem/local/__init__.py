"""The local system: which processes to start, on which ports and GPUs, and their supervision."""
