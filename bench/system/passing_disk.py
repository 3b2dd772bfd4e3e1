"""The process of a faulty disk, a file system that passes calls on to a folder.

    python -m bench.system.passing_disk FOLDER MOUNT STATE

The file system at MOUNT shows the files of FOLDER through FUSE, and does to each call what the file STATE says, a
DiskState of faulty_disk. Nothing is cached. Alone here mfusepy is imported, which loads libfuse.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import mfusepy
import msgspec

from bench.system.faulty_disk import POLL_S, DiskState


class Passing(mfusepy.Operations):
    """The calls of a file system, passed on to `folder` after what the state file says has been suffered."""

    use_ns = True

    def __init__(self, folder: Path, state_file: Path) -> None:
        self._folder, self._state_file = folder, state_file

    def init_with_config(self, conn_info: Any, config_3: Any) -> None:
        config_3.direct_io = 1
        config_3.attr_timeout = config_3.entry_timeout = config_3.negative_timeout = 0.0

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._suffer(is_write=False, is_slow=False)
        found = os.lstat(self._at(path))
        times = {f"st_{name}": getattr(found, f"st_{name}_ns") for name in ("atime", "ctime", "mtime")}
        names = ("mode", "nlink", "size", "uid", "gid")
        return times | {f"st_{name}": getattr(found, f"st_{name}") for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:
        self._suffer(is_write=False)
        return [".", "..", *os.listdir(self._at(path))]

    def open(self, path: str, flags: int) -> int:
        self._suffer(is_write=flags & os.O_ACCMODE != os.O_RDONLY)
        return os.open(self._at(path), flags)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._suffer(is_write=True)
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._suffer(is_write=False)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._suffer(is_write=True)
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        self._suffer(is_write=True)
        os.truncate(self._at(path), length)

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def rename(self, old: str, new: str) -> None:
        self._suffer(is_write=True)
        os.rename(self._at(old), self._at(new))

    def unlink(self, path: str) -> None:
        self._suffer(is_write=True)
        os.unlink(self._at(path))

    def mkdir(self, path: str, mode: int) -> None:
        self._suffer(is_write=True)
        os.mkdir(self._at(path), mode)

    def rmdir(self, path: str) -> None:
        self._suffer(is_write=True)
        os.rmdir(self._at(path))

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        self._suffer(is_write=True)
        os.utime(self._at(path), ns=times or (time.time_ns(), time.time_ns()))

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._folder)
        names = ("bavail", "bfree", "blocks", "bsize", "favail", "ffree", "files", "frsize", "namemax")
        return {f"f_{name}": getattr(found, f"f_{name}") for name in names}

    def _at(self, path: str) -> str:
        return f"{self._folder}{path}"

    def _suffer(self, is_write: bool, is_slow: bool = True) -> None:
        """Do what the state says; raises OSError for a call that is to fail."""
        state = self._state()
        time.sleep(state.delay_s if is_slow else 0.0)
        while state.hangs:
            time.sleep(POLL_S)
            state = self._state()
        if number := state.error or (is_write and state.write_error):
            raise OSError(number, os.strerror(number))

    def _state(self) -> DiskState:
        return msgspec.json.decode(self._state_file.read_bytes(), type=DiskState)


def main() -> int:
    folder, mount, state_file = map(Path, sys.argv[1:4])
    mfusepy.FUSE(Passing(folder, state_file), str(mount), foreground=True, nothreads=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
