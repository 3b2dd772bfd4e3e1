"""The file by which a process tells its supervisor that it is ready."""

import errno
import json
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from contracts.errors import ConfigError

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
RETRY_S = 1.0


class ReadyFile:
    """Written whole: a reader never sees half of it. `path` is None where nobody waits for it.

    A disk that is full ends no service: it works, and says so as soon as there is room.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def write(self, facts: Mapping[str, object]) -> None:
        """Write `facts` as JSON, on a full disk later. Raises ConfigError if that can't be done there at all."""
        if self._path is None:
            return
        try:
            self._write_once(self._path, facts)
        except OSError as error:
            if error.errno not in FULL:
                raise ConfigError(f"can't write ready_file {self._path}: {error.strerror}") from error
            log.warning("can't write ready_file %s yet: %s", self._path, error.strerror)
            threading.Thread(target=self._keep_trying, args=(self._path, facts), daemon=True).start()

    def remove(self) -> None:
        """Take it back at the end of the process."""
        with self._lock, suppress(OSError):
            self._is_over.set()
            if self._path is not None:
                self._path.unlink(missing_ok=True)

    def _keep_trying(self, path: Path, facts: Mapping[str, object]) -> None:
        while not self._is_over.wait(RETRY_S):
            with suppress(OSError):
                self._write_once(path, facts)
                return

    def _write_once(self, path: Path, facts: Mapping[str, object]) -> None:
        draft = Path(f"{path}.{os.getpid()}")
        with self._lock:
            if self._is_over.is_set():
                return
            try:
                draft.write_text(json.dumps(facts))
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)  # half of it, if the disk is full
