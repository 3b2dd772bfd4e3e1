"""A disk that is slow, hangs, fails, takes no writes or is gone, when somebody wants it to be.

    python -m bench.system.faulty_disk FOLDER MOUNT STATE

The file system at MOUNT shows the files of FOLDER through FUSE, and does to each call what the file STATE says.
Nothing is cached. It needs libfuse3 with fusermount3 (the package fuse3), and mfusepy.
"""

import ctypes.util
import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from process.parent_death import die_with_parent

START_TIMEOUT_S = 20.0
_POLL_S = 0.02


class DiskState(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to each call: it takes `delay_s` longer, hangs until there is another state, or fails.

    `error`: of every call, `write_error`: of those that change something; numbers of errno, 0 for none.
    """

    delay_s: float = 0.0
    hangs: bool = False
    error: int = 0
    write_error: int = 0


def missing() -> str:
    """Return why there can be no such disk here, or an empty text."""
    if importlib.util.find_spec("mfusepy") is None:
        return "it needs the Python package mfusepy"
    if shutil.which("fusermount3") is None or ctypes.util.find_library("fuse3") is None:
        return "it needs fusermount3 and libfuse3, of the package fuse3"
    return "" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "it needs /dev/fuse"


class FaultyDisk:
    """The disk at `mount` with the files of `folder`, as a context manager; `folder` itself stays healthy.

    Nobody but the tested processes should use `mount`: who does hangs with the disk.
    """

    def __init__(self, folder: Path, mount: Path) -> None:
        self.folder, self.mount = folder, mount
        self._state_file = mount.with_name(f"{mount.name}.state")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "FaultyDisk":
        if reason := missing():
            raise RuntimeError(reason)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.mount.mkdir(parents=True, exist_ok=True)
        self._write(DiskState())
        self.plug_in()
        return self

    def __exit__(self, *_: object) -> None:
        self._write(DiskState())
        self.pull_out()
        self._unmount()

    @contextmanager
    def during(self, state: DiskState) -> Iterator[None]:
        """Have the disk in this state, and a healthy one afterwards."""
        self._write(state)
        try:
            yield
        finally:
            self._write(DiskState())

    def plug_in(self) -> None:
        """Mount it. Raises RuntimeError if that fails."""
        self._unmount()
        command = [sys.executable, "-m", __name__, str(self.folder), str(self.mount), str(self._state_file)]
        log = self.mount.with_name(f"{self.mount.name}.log")
        with log.open("ab") as said:
            self._process = subprocess.Popen(die_with_parent(command), stdin=subprocess.DEVNULL, stderr=said)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not os.path.ismount(self.mount):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"no FUSE file system at {self.mount}: {log.read_text()[-500:]}")
            time.sleep(_POLL_S)

    def pull_out(self) -> None:
        """Let every call fail, those of open files as well, until it is plugged in again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _unmount(self) -> None:
        subprocess.run(["fusermount3", "-uzq", str(self.mount)], check=False, capture_output=True)

    def _write(self, state: DiskState) -> None:
        partial = self._state_file.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode(state))
        partial.replace(self._state_file)


def main() -> int:
    import mfusepy  # needs libfuse, which who only mounts does not load

    folder, mount, state_file = map(Path, sys.argv[1:4])

    class Passing(mfusepy.Operations):
        """The calls of a file system, passed on to `folder`."""

        use_ns = True

        def init_with_config(self, conn_info: Any, config_3: Any) -> None:
            config_3.direct_io = 1
            config_3.attr_timeout = config_3.entry_timeout = config_3.negative_timeout = 0.0

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            _suffer(state_file, is_write=False, is_slow=False)
            found = os.lstat(_at(path))
            times = {f"st_{name}": getattr(found, f"st_{name}_ns") for name in ("atime", "ctime", "mtime")}
            names = ("mode", "nlink", "size", "uid", "gid")
            return times | {f"st_{name}": getattr(found, f"st_{name}") for name in names}

        def readdir(self, path: str, fh: int) -> list[str]:
            _suffer(state_file, is_write=False)
            return [".", "..", *os.listdir(_at(path))]

        def open(self, path: str, flags: int) -> int:
            _suffer(state_file, is_write=flags & os.O_ACCMODE != os.O_RDONLY)
            return os.open(_at(path), flags)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            _suffer(state_file, is_write=True)
            return os.open(_at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            _suffer(state_file, is_write=False)
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            _suffer(state_file, is_write=True)
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            _suffer(state_file, is_write=True)
            os.truncate(_at(path), length)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def rename(self, old: str, new: str) -> None:
            _suffer(state_file, is_write=True)
            os.rename(_at(old), _at(new))

        def unlink(self, path: str) -> None:
            _suffer(state_file, is_write=True)
            os.unlink(_at(path))

        def mkdir(self, path: str, mode: int) -> None:
            _suffer(state_file, is_write=True)
            os.mkdir(_at(path), mode)

        def rmdir(self, path: str) -> None:
            _suffer(state_file, is_write=True)
            os.rmdir(_at(path))

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
            _suffer(state_file, is_write=True)
            os.utime(_at(path), ns=times or (time.time_ns(), time.time_ns()))

        def statfs(self, path: str) -> dict[str, int]:
            found = os.statvfs(folder)
            names = ("bavail", "bfree", "blocks", "bsize", "favail", "ffree", "files", "frsize", "namemax")
            return {f"f_{name}": getattr(found, f"f_{name}") for name in names}

    def _at(path: str) -> str:
        return f"{folder}{path}"

    mfusepy.FUSE(Passing(), str(mount), foreground=True, nothreads=False)
    return 0


def _suffer(state_file: Path, is_write: bool, is_slow: bool = True) -> None:
    """Do what the state says; raises OSError for a call that is to fail."""
    state = msgspec.json.decode(state_file.read_bytes(), type=DiskState)
    time.sleep(state.delay_s if is_slow else 0.0)
    while state.hangs:
        time.sleep(_POLL_S)
        state = msgspec.json.decode(state_file.read_bytes(), type=DiskState)
    if number := state.error or (is_write and state.write_error):
        raise OSError(number, os.strerror(number))


READ_ONLY, FULL, BROKEN = errno.EROFS, errno.ENOSPC, errno.EIO

if __name__ == "__main__":
    sys.exit(main())
