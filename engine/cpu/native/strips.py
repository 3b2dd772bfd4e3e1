"""Packed matrices in a file that the workers of a machine map and share, or in private memory.

A file has strips as the products read them, matrix after matrix in the order of the model, and nothing else. Its name
has the fingerprint of the weights and the digest of the kernels, so that another of either makes another file, and it
has that name only when all of it is on the disk. It costs the size of the model there; clean pages of a file are the
same memory in all workers, need no swap, and are there for the next start.
"""

import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from kernels.cpu.file_lock import file_lock
from kernels.cpu.native import ALIGNMENT, PackedDiffers, PrivateMemory, StripMemory

_LEAST_FREE = 4
"""How many times a file's size the disk must have free: a cache that fills it would harm more than it gives."""
_LOCK_S = 600.0
"""How long another worker may take to pack a model and load it."""
_UNUSED_S = 30 * 86400.0
"""After how long without a start the strips of a model go when another model is packed."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


class MappedMemory:
    """The pages of a file. They are read-only if all of it is packed already."""

    def __init__(self, file: Path, is_packed: bool) -> None:
        self.is_packed, self._offset = is_packed, 0
        with file.open("rb" if is_packed else "r+b") as stream:
            access = mmap.ACCESS_READ if is_packed else mmap.ACCESS_WRITE
            self.map = mmap.mmap(stream.fileno(), 0, access=access)
        self.map.madvise(mmap.MADV_WILLNEED)
        self._bytes = np.frombuffer(self.map, np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        start, self._offset = self._offset, self._offset + padded(nbytes)
        return self._bytes[start : start + nbytes]


def padded(nbytes: int) -> int:
    """Return what a piece takes of a file."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def load_shared(file: Path, nbytes: int, load: Callable[[StripMemory], T]) -> T:
    """Return what `load` makes with the strips of a file, which is packed first if it is not there.

    The file has `nbytes`; one that is not what the weights give is made anew. Workers that start together take turns,
    and the first packs for all. Where the folder can't be written, its disk has little room, or another worker holds it
    too long, a worker maps the file if it is there and packs for itself if not.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(file.parent / "lock", _LOCK_S):  # to the end: a worker of other kernels removes the file
            if (found := _kept(file, nbytes, load)) is not None:
                os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))
                return found
            _pack(file, nbytes, load)
            return load(MappedMemory(file, is_packed=True))
    except OSError as error:
        if os.access(file, os.R_OK) and (found := _kept(file, nbytes, load)) is not None:
            return found
        _log.info("the weights are not shared with other workers: %s", error)
        return load(PrivateMemory())


def _kept(file: Path, nbytes: int, load: Callable[[StripMemory], T]) -> T | None:
    """Return what `load` makes of the file; None if there is none, or not what the weights give."""
    if not file.exists():
        return None
    try:
        if file.stat().st_size == nbytes:
            return load(MappedMemory(file, is_packed=True))
        reason = f"it has {file.stat().st_size} bytes, not {nbytes}"
    except PackedDiffers as error:
        reason = str(error)
    _log.warning("%s is packed anew: %s", file, reason)
    return None


def _pack(file: Path, nbytes: int, load: Callable[[StripMemory], T]) -> None:
    """Make the file. Raises OSError if the disk has no room for it."""
    _remove_useless(file)
    free = shutil.disk_usage(file.parent).free
    if free < _LEAST_FREE * nbytes:
        raise OSError(f"{file.parent} has {free >> 20} MiB free, less than {_LEAST_FREE} times {nbytes >> 20} MiB")
    with tempfile.TemporaryDirectory(dir=file.parent, suffix=".part") as folder:
        part = Path(folder) / file.name
        with part.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, nbytes)  # a full disk is told of here, not by a signal at a write
            memory = MappedMemory(part, is_packed=False)
            load(memory)
            memory.map.flush()
            os.fsync(stream.fileno())
        part.replace(file)


def _remove_useless(file: Path) -> None:
    """Remove models of long ago, what other kernels packed, and what a process left half written.

    Who has such a file mapped keeps its pages.
    """
    kernels = file.stem.rpartition("-")[2]
    for other in file.parent.glob("*.part"):
        shutil.rmtree(other)
    for other in file.parent.glob(f"*{file.suffix}"):
        is_old = time.time() - other.stat().st_atime > _UNUSED_S
        if is_old or other.stem.rpartition("-")[2] != kernels:
            other.unlink(missing_ok=True)
