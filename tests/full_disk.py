"""A disk that is full when a test wants it to be. Not a test."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SIZE = "256k"


class SmallDisk:
    """A folder on a file system of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Leave no room for one more byte in a new file."""
        with pytest.raises(OSError, match="No space left"), self._filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def clear(self) -> None:
        """Make room again."""
        self._filler.unlink()


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """Mount one at `folder` until the end; the test is skipped where that is not allowed."""
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], capture_output=True
    ).returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
