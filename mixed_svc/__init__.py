"""The engine core of every worker, and the mixed service, which does both sides on one device."""
