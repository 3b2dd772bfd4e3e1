"""A lock that processes of a machine take turns with, held by a file."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOOK_S = 0.05


@contextmanager
def file_lock(file: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock, for which the file is made.

    Raises TimeoutError if another process has it all the while, and OSError if the file can't be made.
    """
    deadline = time.monotonic() + timeout_s
    with file.open("w") as stream:
        while not _is_taken(stream.fileno()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process holds {file} for more than {timeout_s:.0f} s")
            time.sleep(_LOOK_S)
        yield


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
