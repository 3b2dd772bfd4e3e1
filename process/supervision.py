"""The facts that a process and its supervisor exchange: the file that says it is ready, and how it ended."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from contracts.errors import ConfigError


def write_ready_file(path: Path | None, facts: Mapping[str, object]) -> None:
    """`facts` as JSON, atomically: a reader never sees half of it. Raises ConfigError if it can't be written."""
    if path is None:
        return
    draft = Path(f"{path}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(facts))
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"can't write ready_file {path}: {error.strerror}") from error


def describe_exit(code: int) -> str:
    """Of a process that ended with `code`; below 0 it is the signal that killed it."""
    if code >= 0:
        return f"ended with code {code}"
    reason = " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{reason}"
