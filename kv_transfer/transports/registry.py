"""The transports by name, each loaded when it is first used.

ucxx takes half a second and 50 MB that most processes never need.
"""

import importlib
import importlib.util
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError, TransferError
from kv_transfer.chunks.device_pool import DevicePool
from kv_transfer.transports.base import Transport
from kv_transfer.transports.staging_budget import STAGING_NBYTES

_CLASSES = {
    "tcp": "kv_transfer.transports.tcp:TcpTransport",
    "shm": "kv_transfer.transports.shm:ShmTransport",
    "ucx": "kv_transfer.transports.ucx:UcxTransport",
}
_OF_DEVICES = {"ucx": "kv_transfer.transports.ucx_device:UcxDeviceTransport"}


class Transports:
    """The transports of one node.

    `given`: ready transports that replace the ones of the same name. `device`: the pools of all groups, if they are in
    a device's memory.
    """

    def __init__(self, given: Mapping[str, Transport] | None = None, device: Sequence[DevicePool] = ()) -> None:
        self._given, self._device = dict(given or {}), device
        self._loaded = dict(self._given)
        self._lock = threading.Lock()

    def available(self) -> list[str]:
        """Return the names that could work here, by what is given or installed.

        Only opening a channel proves that one does.
        """
        names = dict.fromkeys([*self._given, *_CLASSES])
        return [name for name in names if name in self._given or _is_possible(name)]

    def find(self, name: str) -> Transport:
        """Return the transport. Raises TransferError if it can't be loaded."""
        with self._lock:
            if name not in self._loaded:
                is_device = bool(self._device) and name in _OF_DEVICES
                where, made_of = (_OF_DEVICES[name], [self._device]) if is_device else (_CLASSES[name], [])
                self._loaded[name] = _load(name, where, made_of)
            return self._loaded[name]

    def close(self) -> None:
        with self._lock:
            for transport in self._loaded.values():
                transport.close()
            self._loaded.clear()


def device_staging_nbytes(transport: str) -> int:
    """Return how much of a device's memory a core's links may take, if its operator sets this transport."""
    return STAGING_NBYTES if transport in ("auto", "ucx") and _is_possible("ucx") else 0


def require_available(wish: str, transports: Transports) -> None:
    """Raise ConfigError if the requested transport is missing: no peer could connect to this worker.

    A transport that is requested by name is loaded now, and not in the first handshake.
    """
    if wish == "auto":
        return
    available = transports.available()
    if wish not in available:
        why = ", with its pages in the host's memory," if wish == "nvlink" else ""
        choices = ", ".join(("auto", *available))
        raise ConfigError(f"transfer is {wish!r}, which this worker{why} does not have; set one of {choices}")
    try:
        transports.find(wish)
    except TransferError as error:
        raise ConfigError(f"transfer is {wish!r}: {error}") from error


def _is_possible(name: str) -> bool:
    if name == "ucx":
        return importlib.util.find_spec("ucxx") is not None
    return name != "shm" or Path("/dev/shm").is_dir()


def _load(name: str, where: str, made_of: Sequence[Any]) -> Transport:
    module, _, kind = where.partition(":")
    try:
        return getattr(importlib.import_module(module), kind)(*made_of)
    except (ImportError, OSError, RuntimeError) as error:
        raise TransferError(f"transport '{name}' can't be loaded: {error}") from error
