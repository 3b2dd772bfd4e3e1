"""An Owner in a process of its own, called from here as if it were here.

    python -m tests.kv_transfer.kv_remote FD NAME SETTINGS

FD is a socket: calls come over it pickled, and so go the answers.
"""

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from tests.kv_transfer.kv_liar import lie_once
from tests.kv_transfer.kv_owner import Owner

ANSWER_S = 60.0  # a busy host may take long to start a process and load UCX


class Remote:
    """Every method of an Owner, `lie_once` of kv_liar, `ref`, and `send_signal` to its process."""

    def __init__(self, name: str, **settings: Any) -> None:
        ours, theirs = socket.socketpair()
        packed = msgspec.json.encode({key: _text(value) for key, value in settings.items()}).decode()
        command = [sys.executable, "-m", "tests.kv_transfer.kv_remote", str(theirs.fileno()), name, packed]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._calls = Connection(ours.detach())
        self.name, self.ref = name, self._answer()

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self._calls.send((method, args, options))
            return self._answer()

        return call

    def send_signal(self, signum: int) -> None:
        self._process.send_signal(signum)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._calls.close()

    def _answer(self) -> Any:
        if not self._calls.poll(ANSWER_S):
            raise TimeoutError(f"{self.name} does not answer")
        answer = self._calls.recv()
        if isinstance(answer, AssertionError):
            raise answer
        return answer


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _serve(calls: Connection, owner: Owner) -> None:
    calls.send(owner.ref)
    while True:
        try:
            method, args, options = calls.recv()
        except EOFError:
            os._exit(0)
        try:
            calls.send((lie_once if method == "lie_once" else getattr(owner, method))(*args, **options))
        except AssertionError as error:
            calls.send(error)


def main(fd: str, name: str, packed: str) -> None:
    settings = msgspec.json.decode(packed)
    if "secret" in settings:
        settings["secret"] = settings["secret"].encode()
    _serve(Connection(int(fd)), Owner(name, **settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
