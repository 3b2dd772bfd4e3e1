"""The transport in which the receiver's copy engine reads pages out of the peer's memory.

There is no staging, and no message carries a byte of a page. Its channels carry nothing: the sender reports chunks on
the control connection (data_path.pull_receiver), and the receiver reads them. Only the receiver writes its pages, so it
proves the end of an attempt by waiting for its own copies; the writes of another process were seen to arrive 5 ms after
it was killed.
"""

from collections.abc import Callable
from socket import socket

import msgspec

from contracts.errors import TransferError
from kv_transfer.chunks.device_pool import DevicePool, DeviceSemaphore, RemotePool
from kv_transfer.transports.base import Ring


class NvlinkPoolExport(msgspec.Struct, frozen=True):
    """The description of a pool that the sender exports; see device_pool.DevicePool."""

    pool: bytes
    mark: bytes


class NvlinkTransport:
    """The transport of one pool.

    If the sender's device can set marks, the receiver waits on them for chunks that are not computed yet.
    """

    name = "nvlink"

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool

    def open(self, session: bytes, ring: Ring, connect: Callable[[], socket]) -> "SharedPool":
        """Export the pool. Raises TransferError where the device can't share it."""
        return SharedPool(self._pool.share(), self._pool.mark())

    def accept(
        self, session: bytes, ring: Ring, params: bytes, attached: Callable[[], socket]
    ) -> tuple["MappedPool", bytes]:
        """Map the peer's pool.

        Raises TransferError if it can't be read from here: another host or container, or no path between the two
        devices.
        """
        try:
            sharing = msgspec.msgpack.decode(params, type=NvlinkPoolExport)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransferError(f"the peer does not say what it shares: {error}") from error
        return MappedPool(self._pool.attach(sharing.pool, sharing.mark)), b""

    def close(self) -> None:
        pass


class SharedPool:
    """The sender's end, offer and channel in one: the pool stays exported while this process lives."""

    detail = "read by the peer"

    def __init__(self, pool: bytes, mark: DeviceSemaphore | None) -> None:
        self.mark = mark
        self.params = msgspec.msgpack.encode(NvlinkPoolExport(pool, mark.shared if mark is not None else b""))

    def finish(self, answer: bytes) -> "SharedPool":
        return self

    def cancel(self) -> None:
        pass

    def interrupt(self) -> None:
        """Do nothing: no call waits here."""

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
        """Stop the waits for marks; copies that are under way end by themselves, within milliseconds."""
        self.remote.expire()

    def close(self) -> None:
        self.remote.close()
