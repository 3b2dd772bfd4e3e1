"""What the CPU at hand can run, and how fast."""
