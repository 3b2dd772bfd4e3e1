"""The interface under the data path: one-way channels of staged messages, kept in order.

A channel owns a few staging slots. The sender acquires one, fills it and sends it; the receiver gets it, takes the
bytes out and releases it. The network therefore never touches a page, and giving up an attempt never needs to stop a
transport.
The transport that moves pages without staging, nvlink, is another data path beside this one: its channels carry
nothing, see kv_transfer.data_path.pull_receiver.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from socket import socket
from typing import Any, Protocol

import numpy as np

from kv_transfer.chunks.device_pool import DevicePool, PageScatter
from kv_transfer.chunks.segment import META_NBYTES


@dataclass(frozen=True, slots=True)
class Ring:
    """A channel's staging: `num_slots` payloads of at most `slot_nbytes`; a wait for a free slot ends after
    `stall_timeout_s`. `is_local`: both ends speak over the loopback interface.
    """

    num_slots: int
    slot_nbytes: int
    stall_timeout_s: float
    is_local: bool = False

    @property
    def stride(self) -> int:
        return META_NBYTES + self.slot_nbytes


@dataclass(frozen=True, slots=True)
class Slot:
    """`buffer`: uint8 `[META_NBYTES + slot_nbytes]`."""

    index: int
    buffer: np.ndarray

    @property
    def meta(self) -> np.ndarray:
        return self.buffer[:META_NBYTES]

    @property
    def payload(self) -> Any:
        """uint8 of the host; a device.Buffer in the slots of a DeviceChannel."""
        return self.buffer[META_NBYTES:]


@dataclass(frozen=True, slots=True)
class Taking:
    """Bytes that a device is still taking out of a slot. Then comes `finish`, in the receiver's thread and in the order
    of the messages; it raises what a Take raises.
    """

    unpacking: PageScatter
    finish: Callable[[], None]


Take = Callable[[Slot], Taking | None]
"""Without a Taking the bytes have been taken on return."""


class Channel(Protocol):
    """Used by one thread, except `interrupt`.

    Every call but `close` raises PeerLost once the channel is broken or interrupted.
    """

    @property
    def detail(self) -> str:
        """How the transport itself describes what it uses, for operators."""
        ...

    def interrupt(self) -> None:
        """From any thread: make a blocked call return, with PeerLost."""
        ...

    def close(self) -> None:
        """Give everything back. On return no thread, kernel or network adapter touches a slot."""
        ...


class DeviceChannel:
    """One whose payloads of `slot_nbytes` are in the memory of the pool's device. `is_direct`: never in a host's."""

    pool: DevicePool
    slot_nbytes: int
    is_direct: bool = True


class DeviceInbound(ABC):
    """A receiver's end of a DeviceChannel. It has its part in trying the channel out, before the handshake is over."""

    @abstractmethod
    def be_tried(self, goes_on: Callable[[], bool]) -> None:
        """Take what the sender tries it out with, while `goes_on` says so. Raises TransferError."""

    @abstractmethod
    def expect(self, is_due: Callable[[], bool]) -> None:
        """From any thread: a message is to come. While `is_due` says so, whoever waits for it sleeps in naps only."""

    @abstractmethod
    def close(self) -> None:
        """As a Channel's."""


class Outbound(Channel, Protocol):
    def acquire(self) -> Slot:
        """A free slot; blocks until the peer gave one back. Raises PeerLost if that takes longer than the stall
        timeout.
        """
        ...

    def send(self, slot: Slot, nbytes: int) -> None:
        """Send its meta and the first `nbytes` of its payload; the slot belongs to the channel again."""
        ...

    def flush(self) -> None:
        """Nothing more comes for now: see to it that what was sent leaves. Called once before anything is, too. Raises
        PeerLost as `acquire`.
        """
        ...


class Inbound(Channel, Protocol):
    def receive(self, take: Take) -> None:
        """Give `take` at least one message, in the order of sending; its bytes are gone once they are taken. Raises
        what `take` raises. Blocks without a limit: silence is normal here.
        """
        ...


class ChannelOffer(Protocol):
    """A channel that the sender's end has proposed."""

    @property
    def params(self) -> bytes:
        """What the receiver's end must know."""
        ...

    def finish(self, answer: bytes) -> Any:
        """The channel. Raises TransferError, with everything given back, if it does not work after all."""
        ...

    def cancel(self) -> None:
        """The receiver declined, or is gone."""
        ...


class Transport(Protocol):
    """Its channels are an Outbound and an Inbound, but for nvlink's.

    `connect` and `attached` give a data socket to the peer, already authenticated; not all transports want one.
    `open` and `accept` raise TransferError when this transport can't be used here; the next one is then tried.
    """

    @property
    def name(self) -> str: ...

    def open(self, session: bytes, ring: Ring, connect: Callable[[], socket]) -> ChannelOffer: ...

    def accept(
        self, session: bytes, ring: Ring, params: bytes, attached: Callable[[], socket]
    ) -> tuple[Any, bytes]: ...

    def close(self) -> None: ...
