"""The description of how a process ended."""

import signal


def describe_exit(code: int) -> str:
    """Return how a process ended, in words behind its name; a `code` below 0 is the signal that killed it."""
    if code >= 0:
        return f"ended with code {code}"
    reason = " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{reason}"
