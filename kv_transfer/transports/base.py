"""The interface under the data path: one-way channels of staged messages, kept in order.

A channel owns a few staging slots. The sender acquires one, fills it and sends it; the receiver gets it, copies the
bytes out and releases it. The network therefore never touches a page, and giving up an attempt never needs to stop a
transport.

The transport that moves pages without staging, nvlink, uses another data path: its channels carry nothing, see
kv_transfer.data_path.pull_receiver.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from socket import socket
from typing import Any, Protocol

import numpy as np

from kv_transfer.chunks.device_pool import DevicePool, PageScatter
from kv_transfer.chunks.wire_format import META_NBYTES


@dataclass(frozen=True, slots=True)
class Ring:
    """The dimensions of a channel's staging: `num_slots` payloads of at most `slot_nbytes`.

    A wait for a free slot ends after `stall_timeout_s`, and the trial of a new channel after `trial_timeout_s`.
    `is_local`: both ends are connected over the loopback interface.
    """

    num_slots: int
    slot_nbytes: int
    stall_timeout_s: float
    trial_timeout_s: float = 4.0
    is_local: bool = False

    @property
    def stride(self) -> int:
        return META_NBYTES + self.slot_nbytes


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of a channel. `buffer`: uint8 `[META_NBYTES + slot_nbytes]`."""

    index: int
    buffer: np.ndarray

    @property
    def meta(self) -> np.ndarray:
        return self.buffer[:META_NBYTES]

    @property
    def payload(self) -> Any:
        """Return the payload: uint8 in host memory; a device_pool.Buffer in the slots of a DeviceChannel."""
        return self.buffer[META_NBYTES:]


@dataclass(frozen=True, slots=True)
class Taking:
    """A copy by which a device is still taking bytes out of a slot.

    `finish` is called when it is done, in the receiver's thread and in the order of the messages; it raises what a Take
    raises.
    """

    unpacking: PageScatter
    finish: Callable[[], None]


Take = Callable[[Slot], Taking | None]
"""A function that takes the bytes of a message. If it returns no Taking, they have been taken on return."""


class Channel(Protocol):
    """One end of a channel, used by one thread, except for `interrupt`.

    Every call but `close` raises PeerLost once the channel is broken or interrupted.
    """

    @property
    def detail(self) -> str:
        """Return how the transport itself describes what it uses, for operators."""
        ...

    def interrupt(self) -> None:
        """Make a blocked call return with PeerLost; from any thread."""
        ...

    def close(self) -> None:
        """Free everything. On return no thread, kernel or network adapter touches a slot."""
        ...


class DeviceChannel:
    """A channel whose payloads of `slot_nbytes` are in the memory of the pools' device.

    `pools` are those of all groups. `is_direct`: the bytes never pass through a host's memory.
    """

    pools: Sequence[DevicePool]
    slot_nbytes: int
    is_direct: bool = True

    @property
    def pool(self) -> DevicePool:
        """Return the first group's pool, for what concerns the device."""
        return self.pools[0]


class DeviceInbound(ABC):
    """The receiver's end of a DeviceChannel, which takes part in the trial of the channel.

    The trial is a part of the handshake.
    """

    @abstractmethod
    def be_tried(self, goes_on: Callable[[], bool]) -> None:
        """Take the messages of the sender's trial while `goes_on` returns True. Raises TransferError."""

    @abstractmethod
    def expect(self, is_due: Callable[[], bool]) -> None:
        """Announce a message, from any thread: while `is_due` returns True, its wait sleeps in naps only."""

    @abstractmethod
    def close(self) -> None:
        """Free everything, as Channel.close does."""


class Outbound(Channel, Protocol):
    """The sender's end of a channel."""

    def acquire(self) -> Slot:
        """Return a free slot, waiting until the peer has returned one.

        Raises PeerLost if that takes longer than the stall timeout.
        """
        ...

    def send(self, slot: Slot, nbytes: int) -> None:
        """Send the slot's meta and the first `nbytes` of its payload; the slot belongs to the channel again."""
        ...

    def flush(self) -> None:
        """Make sure that what was sent leaves, since nothing more comes for now.

        It is also called once before anything is sent. Raises PeerLost as `acquire` does.
        """
        ...


class Inbound(Channel, Protocol):
    """The receiver's end of a channel."""

    def receive(self, take: Take) -> None:
        """Pass at least one message to `take`, in the order of sending.

        The bytes are gone once they are taken. Raises what `take` raises. Blocks without a limit: silence is normal
        here.
        """
        ...


class ChannelOffer(Protocol):
    """A channel that the sender's end has proposed."""

    @property
    def params(self) -> bytes:
        """Return what the receiver's end needs to know."""
        ...

    def finish(self, answer: bytes) -> Any:
        """Return the channel. Raises TransferError, with everything freed, if it does not work after all."""
        ...

    def cancel(self) -> None:
        """Free everything: the receiver declined, or is gone."""
        ...


class Transport(Protocol):
    """A way to carry chunks. Its channels are an Outbound and an Inbound, except for nvlink's.

    `connect` and `attached` return a data socket to the peer, already authenticated; not all transports need one.
    `open` and `accept` raise TransferError if this transport can't be used here; the next one is then tried.
    """

    @property
    def name(self) -> str: ...

    def open(self, session: bytes, ring: Ring, connect: Callable[[], socket]) -> ChannelOffer: ...

    def accept(
        self, session: bytes, ring: Ring, params: bytes, attached: Callable[[], socket]
    ) -> tuple[Any, bytes]: ...

    def close(self) -> None: ...
