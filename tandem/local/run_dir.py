"""The folder of one running system: its lock, its logs, and the state that `tandem ps` reads."""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from contracts.errors import ConfigError


def state_home(environ: Mapping[str, str]) -> Path:
    """Return the home of run folders: `$XDG_STATE_HOME/tandem`, or `~/.local/state/tandem`.

    A relative path is ignored, as the XDG base directory specification requires: services run from another folder.
    """
    base = Path(environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path(environ.get("HOME", "/tmp")) / ".local" / "state") / "tandem"


class RunDir:
    """The folder `HOME/<port>`, held by one supervisor at a time and private to its user.

    Logs stay until the next start.
    """

    def __init__(self, home: Path, port: int) -> None:
        self.path = home / str(port)
        self.logs = self.path / "logs"
        self.ready = self.path / "ready"
        self.redis_socket = self.path / "redis.sock"
        self.state_file = self.path / "state.json"

    def __enter__(self) -> "RunDir":
        """Lock and clear the folder. Raises ConfigError if it is held already, or can't be written."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"can't write to {self.path}: {error.strerror}; set XDG_STATE_HOME") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise _taken(self.path) from error
        try:
            self._clear()
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"can't write to {self.path}: {error.strerror}; set XDG_STATE_HOME") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self.state_file.unlink(missing_ok=True)
        shutil.rmtree(self.ready, ignore_errors=True)
        os.close(self._lock)

    def _clear(self) -> None:
        for folder in (self.logs, self.ready):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        self.state_file.unlink(missing_ok=True)

    def write_state(self, state: dict) -> None:
        """Write the state in one step: a reader never sees half of it.

        Raises OSError, and leaves the former state in place.
        """
        draft = self.state_file.with_suffix(".draft")
        try:
            draft.write_text(json.dumps(state, indent=1))
            draft.replace(self.state_file)
        finally:
            draft.unlink(missing_ok=True)


def require_free(home: Path, port: int) -> None:
    """Raise ConfigError if a supervisor holds that port's folder. Nothing is written."""
    path = home / str(port)
    with suppress(OSError), (path / "lock").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _taken(path) from error


def _taken(path: Path) -> ConfigError:
    return ConfigError(f"a Tandem system runs on port {path.name} already (`tandem ps` shows it); set PORT to another")
