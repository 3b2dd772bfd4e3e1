"""The transport in which the receiver's copy engine reads pages out of the peer's memory.

There is no staging, and no message carries a byte of a page. Its channels carry nothing: the sender reports chunks on
the control connection (data_path.pull_sender), and the receiver copies them (data_path.pull_receiver, by
engine.cuda.kv.peer_pool). Here pools are exported and mapped. Only the receiver writes its pages, so it
proves the end of an attempt by waiting for its own copies; the writes of another process were seen to arrive 5 ms after
it was killed.
"""

from collections.abc import Callable, Sequence
from socket import socket

import msgspec

from contracts.errors import TransferError
from kv_transfer.chunks.device_pool import DevicePool, DeviceSemaphore, RemotePool
from kv_transfer.transports.base import Ring


class NvlinkPoolExport(msgspec.Struct, frozen=True):
    """The description of the pools that the sender exports, one of each group; see device_pool.DevicePool."""

    pools: list[bytes]
    mark: bytes


class NvlinkTransport:
    """The transport of the pools of all groups, which are on one device.

    If the sender's device can set marks, the receiver waits on them for chunks that are not computed yet.
    """

    name = "nvlink"

    def __init__(self, pools: Sequence[DevicePool]) -> None:
        self._pools = pools

    def open(self, session: bytes, ring: Ring, connect: Callable[[], socket]) -> "SharedPool":
        """Export the pools. Raises TransferError where the device can't share them."""
        return SharedPool([pool.share() for pool in self._pools], self._pools[0].mark())

    def accept(
        self, session: bytes, ring: Ring, params: bytes, attached: Callable[[], socket]
    ) -> tuple["MappedPool", bytes]:
        """Map the peer's pools.

        Raises TransferError if it can't be read from here: another host or container, or no path between the two
        devices.
        """
        try:
            sharing = msgspec.msgpack.decode(params, type=NvlinkPoolExport)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransferError(f"the peer does not say what it shares: {error}") from error
        if len(sharing.pools) != len(self._pools):
            raise TransferError(f"the peer shares {len(sharing.pools)} pools; the layout has {len(self._pools)} groups")
        remotes: list[RemotePool] = []
        try:
            for pool, shared in zip(self._pools, sharing.pools, strict=True):
                remotes.append(pool.attach(shared, sharing.mark))
        except TransferError:
            MappedPool(remotes).close()
            raise
        return MappedPool(remotes), b""

    def close(self) -> None:
        pass


class SharedPool:
    """The sender's end, offer and channel in one: the pools stay exported while this process lives."""

    detail = "read by the peer"

    def __init__(self, pools: list[bytes], mark: DeviceSemaphore | None) -> None:
        self.mark = mark
        self.params = msgspec.msgpack.encode(NvlinkPoolExport(pools, mark.shared if mark is not None else b""))

    def finish(self, answer: bytes) -> "SharedPool":
        return self

    def cancel(self) -> None:
        pass

    def interrupt(self) -> None:
        """Do nothing: no call waits here."""

    def close(self) -> None:
        pass


class MappedPool:
    """The receiver's end: the peer's pool of each group."""

    def __init__(self, remotes: Sequence[RemotePool]) -> None:
        self.remotes = remotes

    @property
    def detail(self) -> str:
        return "; ".join(remote.detail for remote in self.remotes)

    def interrupt(self) -> None:
        """Stop the waits for marks; copies that are under way end by themselves, within milliseconds."""
        for remote in self.remotes:
            remote.expire()

    def close(self) -> None:
        for remote in self.remotes:
            remote.close()
