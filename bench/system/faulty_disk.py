"""A disk that is slow, hangs, fails, takes no writes or is gone, when somebody wants it to be.

passing_disk is its process. It needs libfuse3 with fusermount3 (the package fuse3), and mfusepy.
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

import msgspec

from process.parent_death import die_with_parent

START_TIMEOUT_S = 20.0
POLL_S = 0.02
READ_ONLY, FULL, BROKEN = errno.EROFS, errno.ENOSPC, errno.EIO


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
        command = [
            sys.executable,
            "-m",
            "bench.system.passing_disk",
            str(self.folder),
            str(self.mount),
            str(self._state_file),
        ]
        log = self.mount.with_name(f"{self.mount.name}.log")
        with log.open("ab") as said:
            self._process = subprocess.Popen(die_with_parent(command), stdin=subprocess.DEVNULL, stderr=said)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not os.path.ismount(self.mount):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"no FUSE file system at {self.mount}: {log.read_text()[-500:]}")
            time.sleep(POLL_S)

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
