"""Records in a folder that several workers see, such as one on NFS.

Each is a file, written once, by anyone.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from contracts.errors import OutOfBlocks, Unavailable
from contracts.kv_store import BlockKey
from kv_transfer.chunks.block_record import VERSION
from process.path_presence import is_folder, is_there

_NOT_KEPT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
"""The errors of a folder that is full or read only, and can be read all the same."""


class SharedFolder:
    """The record files of a folder: see remote_store.RecordStore.

    Nothing here removes old ones: its owner does.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._root = folder, folder / f"v{VERSION}"

    def count_held(self, keys: Sequence[BlockKey]) -> int:
        with self._checked():
            return next((index for index, key in enumerate(keys) if not is_there(self._path(key))), len(keys))

    def get(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        with self._checked():
            return [self._read(key) for key in keys]

    def put(self, key: BlockKey, record: memoryview) -> None:
        with self._checked():
            self._put(key, record)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            with suppress(OSError):  # it will be found faulty again
                self._path(key).unlink(missing_ok=True)

    def describe(self) -> str:
        """Return where it is and how much is free; see RecordStore."""
        with self._checked():
            if not os.access(self._folder, os.W_OK):
                raise OutOfBlocks(f"{self._folder} is read only: change its owner or its mount")
            return f"the folder {self._folder}, {shutil.disk_usage(self._folder).free / 2**30:.1f} GiB free"

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def _put(self, key: BlockKey, record: memoryview) -> None:
        path = self._path(key)
        partial = path.with_suffix(f".{uuid.uuid4().hex}.part")
        try:
            if is_there(path):
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(record)
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            if error.errno in _NOT_KEPT:
                raise OutOfBlocks(str(error)) from error
            raise

    def _read(self, key: BlockKey) -> bytes | None:
        try:
            data = self._path(key).read_bytes()
            with suppress(OSError):
                os.utime(self._path(key))  # so that its owner can remove what was long unused
            return data
        except FileNotFoundError:
            return None

    @contextmanager
    def _checked(self) -> Generator[None, None, None]:
        """Raise Unavailable if it is not there, or for an error, which a look at a stale mount is, too.

        Made anew, a folder that is not mounted would fill the disk below.
        """
        try:
            if not is_folder(self._folder):
                raise Unavailable(f"{self._folder} is no folder: make or mount it")
            yield
        except OSError as error:
            raise Unavailable(str(error)) from error

    def _path(self, key: BlockKey) -> Path:
        name = key.hex()
        return self._root / name[:2] / f"{name}.kv"
