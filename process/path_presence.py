"""Whether something is at a path, where a file system that fails is not taken for an empty one."""

from pathlib import Path


def is_there(path: Path) -> bool:
    """Return whether there is a file or folder.

    Raises OSError if that can't be known, as of a mount whose server is gone. Path.exists says no to that, from Python
    3.14 on.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
