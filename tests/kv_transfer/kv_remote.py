"""An Owner in a process of its own, called from here as if it were here.

    python -m tests.kv_transfer.kv_remote FD NAME SETTINGS

FD is a socket: calls come over it pickled, and so go the answers.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import psutil

from kv_transfer.connection.control_connection import ControlConnection
from tests.kv_transfer.kv_liar import lie_once
from tests.kv_transfer.kv_owner import Owner

ANSWER_S = 60.0  # a busy host may take long to start a process and load UCX
SOON_S = 0.1


class Remote:
    """Every method of an Owner, `lie_once` of kv_liar, `ref`, and what stops or ends its process."""

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

    def stop_behind_a_look(self) -> None:
        """Stop the process as SIGSTOP would, when a link of it has looked for messages and found none."""
        self.stop_soon()
        deadline = time.monotonic() + ANSWER_S
        while psutil.Process(self._process.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline, f"{self.name} looks for no message"
            time.sleep(0.01)

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


def stop_soon() -> None:
    """In this process, once the answer to this call is out."""
    read, due_s = ControlConnection._read, time.monotonic() + SOON_S

    def read_and_stop(*args: Any) -> bool:
        has_read = read(*args)
        if not has_read and time.monotonic() > due_s:
            ControlConnection._read = read  # type: ignore[method-assign]
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # at once: another thread would take a moment
        return has_read

    ControlConnection._read = read_and_stop  # type: ignore[method-assign]


def _serve(calls: Connection, owner: Owner) -> None:
    calls.send(owner.ref)
    while True:
        try:
            method, args, options = calls.recv()
        except EOFError:
            os._exit(0)
        try:
            calls.send((OF_THE_PROCESS.get(method) or getattr(owner, method))(*args, **options))
        except AssertionError as error:
            calls.send(error)


OF_THE_PROCESS = {"lie_once": lie_once, "stop_soon": stop_soon}


def main(fd: str, name: str, packed: str) -> None:
    settings = msgspec.json.decode(packed)
    if "secret" in settings:
        settings["secret"] = settings["secret"].encode()
    _serve(Connection(int(fd)), Owner(name, **settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
