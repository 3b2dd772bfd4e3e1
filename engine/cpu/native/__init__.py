"""The native path of the CPU: weights as their file stores them, a step in one call."""
