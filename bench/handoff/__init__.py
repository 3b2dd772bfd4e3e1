"""The handoff: transports, pages, a pair on two GPUs, and what kills do to it."""
