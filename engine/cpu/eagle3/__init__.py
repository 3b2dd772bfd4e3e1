"""EAGLE3 heads on the CPU: what they read of a batch, their KV, and their drafts."""
