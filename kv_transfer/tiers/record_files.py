"""The records of blocks as files of a folder, one each.

A record is written beside its place and renamed into it, so a reader finds a whole one or none while the system runs.
Nothing is flushed: after a power cut a file may be empty or torn, which the checksum of the record finds. The name says
what an index needs, so that no file is read to make one:

    FOLDER/v4/LAYOUT_ID/ab/KEY.PARENT.MICROSECONDS.kv     key and parent in hexadecimal, "-" for no parent
"""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from contracts.kv_store import BlockKey, BlockWorth
from kv_transfer.chunks.block_record import VERSION

DIRECT_ALIGNMENT = 4096
_SUFFIX = ".kv"
_PARTIAL = ".part"
_READ_AHEAD = 16
_VERSION = re.compile(r"v\d+")


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A file that was found. `used_at_s`: when it was last read or written, in seconds since 1970."""

    key: BlockKey
    worth: BlockWorth
    place: str
    nbytes: int
    used_at_s: float


class ForeignFile(NamedTuple):
    """A record that can't be used here. `used_at_s`: see RecordFile."""

    used_at_s: float
    place: str
    nbytes: int


class RecordFiles:
    """The files of records below `folder`, those of one layout and others'.

    Errors are OSError, for the caller to judge. A `place` is a path from the folder of this version of records on.
    `is_direct`: they are read past the system's page cache, where the file system can, into buffers whose address and
    size are multiples of DIRECT_ALIGNMENT.
    """

    def __init__(self, folder: Path, layout_id: str, is_direct: bool = False) -> None:
        self.folder, self._is_direct = folder, is_direct
        self._root, self._layout_id = folder / f"v{VERSION}", layout_id

    def place(self, key: BlockKey, worth: BlockWorth) -> str:
        """Return where the record of a key belongs."""
        parent = "-" if worth.parent is None else worth.parent.hex()
        name = f"{key.hex()}.{parent}.{round(worth.compute_s * 1e6)}{_SUFFIX}"
        return f"{self._layout_id}/{name[:2]}/{name}"

    def write(self, place: str, record: memoryview) -> None:
        """Write a record; a fault leaves no file behind where the system lets it be removed."""
        path = self._root / place
        if not path.parent.is_dir():
            path.parent.parent.mkdir(exist_ok=True)
            path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}{_PARTIAL}")
        try:
            with partial.open("wb", buffering=0) as file:
                if (written := file.write(record)) != len(record):
                    raise OSError(errno.ENOSPC, f"{written} of {len(record)} bytes were written", str(partial))
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise

    def read(self, places: Sequence[str], into: Sequence[memoryview]) -> Iterator[int]:
        """Yield the bytes of each record as it is read into its buffer.

        Raises OSError at the first that can't be read, after all before it, though it was opened ahead of them.
        """
        files: list[int | OSError] = []
        try:
            for index in range(len(places)):
                while len(files) < min(index + _READ_AHEAD, len(places)):
                    files.append(self._open_or_error(places[len(files)]))
                if isinstance(file := files[index], OSError):
                    raise file
                yield os.readv(file, [into[index]])
                with suppress(OSError):  # of a disk that is read only
                    os.utime(file)  # the order in which a later start finds them
        finally:
            for file in files:
                if isinstance(file, int):
                    os.close(file)

    def remove(self, place: str) -> None:
        """Remove a record; one that is gone already is no error."""
        (self._root / place).unlink(missing_ok=True)

    def nbytes(self, place: str) -> int:
        """Return the size of a record; 0 if that can't be told: a disk that fails so takes nothing new."""
        try:
            return (self._root / place).stat().st_size
        except OSError:
            return 0

    def make_folder(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)

    def exists(self) -> bool:
        return os.path.isdir(self._root)  # Path.is_dir raises the error of a disk that fails

    def scan(self) -> Iterator[RecordFile]:
        """Yield every record of our layout, and remove what a writer that died left half written."""
        for group in sorted(self._root.glob(f"{self._layout_id}/*/")):
            prefix = f"{self._layout_id}/{group.name}/"
            with os.scandir(group) as entries:
                yield from (found for entry in entries if (found := _record_file(prefix, entry)) is not None)

    def scan_foreign(self) -> Iterator[ForeignFile]:
        """Yield the records of other layouts and of other versions of records."""
        for group in sorted(self.folder.glob("v*/*/*/")):
            if group.parent == self._root / self._layout_id or not _VERSION.fullmatch(group.parents[1].name):
                continue
            prefix = os.path.relpath(group, self._root)
            with os.scandir(group) as entries:
                yield from (_foreign_file(prefix, entry) for entry in entries if entry.is_file(follow_symlinks=False))

    def others(self) -> list[str]:
        """Return the names in the folder that are no records."""
        paths = (path for path in self.folder.iterdir() if path.suffix != ".lock")
        return sorted(path.name for path in paths if not (path.is_dir() and _VERSION.fullmatch(path.name)))

    def _open_or_error(self, place: str) -> int | OSError:
        try:
            return self._open(place)
        except OSError as error:
            return error

    def _open(self, place: str) -> int:
        if self._is_direct:
            try:
                return os.open(self._root / place, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False  # not on this file system
        file = os.open(self._root / place, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        return file


def _foreign_file(prefix: str, entry: "os.DirEntry[str]") -> ForeignFile:
    stat = entry.stat(follow_symlinks=False)
    return ForeignFile(stat.st_mtime, f"{prefix}/{entry.name}", stat.st_size)


def _record_file(prefix: str, entry: "os.DirEntry[str]") -> RecordFile | None:
    """Return the record that a file's name states, or None if it is none."""
    if entry.name.endswith(_PARTIAL):
        with suppress(OSError):
            os.unlink(entry.path)
        return None
    try:
        key, parent, microseconds, _ = entry.name.split(".")
        worth = BlockWorth(
            compute_s=int(microseconds) / 1e6, parent=None if parent == "-" else BlockKey(bytes.fromhex(parent))
        )
        stat = entry.stat()
        return RecordFile(BlockKey(bytes.fromhex(key)), worth, prefix + entry.name, stat.st_size, stat.st_mtime)
    except (ValueError, FileNotFoundError):
        return None
