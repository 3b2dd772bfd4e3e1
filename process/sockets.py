"""The sockets of a process: what it listens on, free ports, and the URL others reach it by."""

import contextlib
import errno
import random
import socket

from contracts.errors import ConfigError
from process.listener import PausingListener

_SERVER_PORTS = 10_000, 32_768
"""Linux gives connections 32768 and above."""


def listen(host: str, port: int, backlog: int = 128, silence_s: float = 0.0) -> PausingListener:
    """Return a listening TCP socket; port 0 takes a free one. Raises ConfigError naming both.

    `silence_s`: a peer that takes nothing of what is sent for so long is gone, where the platform has that option; 0.0
    leaves it to the system's retries, which go on for a quarter of an hour.
    """
    listener = PausingListener(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Inherited by what it accepts. asyncio turns Nagle off only where the protocol number is spelled out; else a token
    # waits 40 ms for the acknowledgement of the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if silence_s and hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited, too
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))
    try:
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        other = "--host" if is_host else "--port"
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}; choose another {other}") from error
    return listener


def free_port() -> int:
    """Return a free port of the loopback interface for a server that binds it later, or again.

    It is below the ports that the system gives to connections, so that no connection has it by then.
    """
    while True:
        port = random.randrange(*_SERVER_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def http_url(host: str, port: int) -> str:
    """Return the URL of what listens on `host`.

    If that is every address, the URL has the one by which this machine reaches it.
    """
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
