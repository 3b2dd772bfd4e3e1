"""What is at a path, where a file system that fails is not taken for an empty one.

Both raise OSError if that can't be known, as of a mount whose server is gone. Path.exists and Path.is_dir say no to
that, from Python 3.14 on.
"""

import os
import stat
from pathlib import Path


def is_there(path: Path) -> bool:
    """Return whether there is a file or folder."""
    return _status(path) is not None


def is_folder(path: Path) -> bool:
    """Return whether there is a folder."""
    found = _status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
