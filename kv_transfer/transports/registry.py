"""Transports by name, each loaded when first used: ucxx takes half a second and 50 MB that most processes never
need.
"""

import importlib
import importlib.util
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from contracts.errors import TransferError
from kv_transfer.transports.base import Transport

_CLASSES = {
    "loopback": "kv_transfer.transports.loopback:LoopbackTransport",
    "tcp": "kv_transfer.transports.tcp:TcpTransport",
    "shm": "kv_transfer.transports.shm:ShmTransport",
    "ucx": "kv_transfer.transports.ucx:UcxTransport",
}


class Transports:
    """`given`: ready transports that stand in for the ones of the same name."""

    def __init__(self, given: Mapping[str, Transport] | None = None) -> None:
        self._given = dict(given or {})
        self._loaded = dict(self._given)
        self._lock = threading.Lock()

    def available(self) -> list[str]:
        """Names that could work here, by what is given or installed; opening a channel is the proof."""
        names = dict.fromkeys([*self._given, *_CLASSES])
        return [name for name in names if name in self._given or _is_possible(name)]

    def find(self, name: str) -> Transport:
        """Raises TransferError if it can't be loaded."""
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = _load(name)
            return self._loaded[name]

    def close(self) -> None:
        with self._lock:
            for transport in self._loaded.values():
                transport.close()
            self._loaded.clear()


def _is_possible(name: str) -> bool:
    if name == "ucx":
        return importlib.util.find_spec("ucxx") is not None
    return name != "shm" or Path("/dev/shm").is_dir()


def _load(name: str) -> Transport:
    module, _, kind = _CLASSES[name].partition(":")
    if name == "ucx":
        # ucxx sets a variable that its own UCX does not know; each process would warn of it. Read when UCX is loaded.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        return getattr(importlib.import_module(module), kind)()
    except (ImportError, OSError, RuntimeError) as error:
        raise TransferError(f"transport '{name}' can't be loaded: {error}") from error
