"""The ports of this machine: whether one is free, the process that holds it, and any free one."""

import errno
import socket

import psutil

from contracts.errors import ConfigError

HOST_ADVICE = "set --host or TANDEM_HOST to an address of this machine"


def claim_port(host: str, port: int) -> int:
    """Return `port` if it can be listened on, or a free one for 0. Raises ConfigError naming its holder."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return probe.getsockname()[1]
    except PermissionError as error:
        raise ConfigError(f"port {port} needs root; set PORT (or --port) to one above 1023") from error
    except socket.gaierror as error:
        raise ConfigError(f"can't listen on {host}: no such host; {HOST_ADVICE}") from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}; {HOST_ADVICE}") from error
        if port and (holder := describe_holder(port)):
            raise ConfigError(f"port {port} is taken by {holder}; set PORT (or --port) to another") from error
        raise ConfigError(
            f"can't listen on {host}:{port}: {error.strerror}; set PORT (or --port) to another"
        ) from error


def describe_holder(port: int) -> str | None:
    """Return name and id of the process that listens on `port`; None if there is none."""
    try:
        listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.AccessDenied:
        return "another process"
    for connection in listening:
        if connection.laddr and connection.laddr.port == port:
            return _describe(connection.pid)
    return None


def _describe(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.NoSuchProcess:
        return f"a process that just ended (pid {pid})"
