"""Pages pulled out of the peer's memory by the receiver's copy engine: no staging, no message carries a byte of them.

Its channels carry nothing: the sender tells of chunks on the control connection (data_path.pull_receiver), and the
receiver reads them. The receiver is the only one that writes its pages, so it proves the end of an attempt by waiting
for its own copies; a foreign writer's were seen to land 5 ms after its process was killed.
"""

from collections.abc import Callable
from socket import socket

import msgspec

from contracts.errors import TransferError
from kv_transfer.chunks.device_pool import DevicePool, DeviceSemaphore, RemotePool
from kv_transfer.transports.base import Ring


class NvlinkPoolExport(msgspec.Struct, frozen=True):
    """What the sender tells of itself: see device.DevicePool."""

    pool: bytes
    mark: bytes


class NvlinkTransport:
    """Where the sender's device can set marks, the receiver waits by one for chunks that are not computed yet."""

    name = "nvlink"

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool

    def open(self, session: bytes, ring: Ring, connect: Callable[[], socket]) -> "SharedPool":
        """Raises TransferError where the device lets nobody in."""
        return SharedPool(self._pool.share(), self._pool.mark())

    def accept(
        self, session: bytes, ring: Ring, params: bytes, attached: Callable[[], socket]
    ) -> tuple["MappedPool", bytes]:
        """Raises TransferError if the peer's pool can't be read from here: another host or container, no way between
        the two devices.
        """
        try:
            sharing = msgspec.msgpack.decode(params, type=NvlinkPoolExport)
        except msgspec.DecodeError as error:
            raise TransferError(f"the peer does not say what it shares: {error}") from error
        return MappedPool(self._pool.attach(sharing.pool, sharing.mark)), b""

    def close(self) -> None:
        pass


class SharedPool:
    """The sender's end, opening and channel in one: the pool stays exported while this process lives."""

    detail = "read by the peer"

    def __init__(self, pool: bytes, mark: DeviceSemaphore | None) -> None:
        self.mark = mark
        self.params = msgspec.msgpack.encode(NvlinkPoolExport(pool, mark.shared if mark is not None else b""))

    def finish(self, answer: bytes) -> "SharedPool":
        return self

    def cancel(self) -> None:
        pass

    def interrupt(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        pass


class MappedPool:
    """The receiver's end."""

    def __init__(self, remote: RemotePool) -> None:
        self.remote = remote

    @property
    def detail(self) -> str:
        return self.remote.detail

    def interrupt(self) -> None:
        """Copies that are under way end by themselves, within milliseconds; what waits for a mark is told not to."""
        self.remote.expire()

    def close(self) -> None:
        self.remote.close()
