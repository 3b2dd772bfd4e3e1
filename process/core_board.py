"""The board on which the processes of a machine tell who computes: a page of shared memory.

What stands there is the business of kernels/csrc/cpu/board.h. Here a process gets a line that no other has: it holds a
lock on a byte of the file, which the kernel takes back when the process ends, however it ends. Processes that may use
other cores, or whose time another control group limits, have another board; so have other users.
"""

import fcntl
import hashlib
import logging
import mmap
import os
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from process.usable_cores import limiting_group, usable_cores

SHARED = Path("/dev/shm")
PAGE_NBYTES, NUM_SEATS = 4096, 63
_F_OFD_SETLK = 37
"""A lock that belongs to the open file and not to the process, so that two parts of one process don't share it."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoreSeat:
    """A line on a board, which is this process's until `descriptor` is closed.

    `num_cores`: those that all processes of the board have together.
    """

    page: mmap.mmap
    number: int
    num_cores: int
    descriptor: int


@cache
def own_seat() -> CoreSeat | None:
    """Return this process's seat, the same at each call.

    None if there is none: it shares with nobody then.
    """
    try:
        return take_seat(SHARED)
    except OSError as error:
        _log.info("cores are not shared with other workers of this machine: %s", error)
        return None


def take_seat(folder: Path) -> CoreSeat:
    """Return a seat on the board in this folder that no process has.

    Raises OSError if there is none, or no board.
    """
    file = folder / f"tandem-cores-{os.geteuid()}-{_digest()}"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{file} is another user's")
        os.posix_fallocate(descriptor, 0, PAGE_NBYTES)  # a write to memory that is full would end the process
        number = _lock_seat(descriptor)
        return CoreSeat(mmap.mmap(descriptor, PAGE_NBYTES), number, usable_cores(), descriptor)
    except OSError:
        os.close(descriptor)
        raise


def _lock_seat(descriptor: int) -> int:
    for number in range(NUM_SEATS):
        lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        try:
            fcntl.fcntl(descriptor, _F_OFD_SETLK, lock)
        except BlockingIOError:
            continue
        return number
    raise OSError(f"all {NUM_SEATS} seats are taken")


def _digest() -> str:
    """Return what those have in common who share cores: which ones, and the group whose time they share."""
    group = limiting_group()
    facts = sorted(os.sched_getaffinity(0)), None if group is None else (group.stat().st_dev, group.stat().st_ino)
    return hashlib.blake2b(repr((1, facts)).encode(), digest_size=6).hexdigest()
