"""The TCP connections of another process, broken as a network breaks them. Not a test."""

import ctypes
import os
import socket
from contextlib import suppress

import pytest

_PIDFD_GETFD = 438
"""The number of the system call on x86-64 and arm64, for which Python has no name."""


def reset_tcp(pid: int) -> int:
    """Shut down all TCP connections of process `pid`; return how many. Skip the test where that is not allowed."""
    process, count = os.pidfd_open(pid), 0
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    count += _reset(process, int(name))
    finally:
        os.close(process)
    return count


def _reset(process: int, number: int) -> bool:
    """Shut down one socket if it is a connection. Raises OSError if it is none, or closed meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    copy = libc.syscall(_PIDFD_GETFD, process, number, 0)
    if copy < 0 and ctypes.get_errno() == 1:
        pytest.skip("this process may not take sockets of others (CAP_SYS_PTRACE)")
    if copy < 0:
        return False
    with socket.socket(fileno=copy) as taken:
        if taken.family not in (socket.AF_INET, socket.AF_INET6) or not taken.getpeername():
            return False
        taken.shutdown(socket.SHUT_RDWR)
    return True
