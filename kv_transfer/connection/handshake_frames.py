"""The frames of a handshake, in the order in which they are sent.

After it the control connection carries contracts.handoff messages.
"""

import msgspec

from contracts import codec
from contracts.handoff import HandoffMessage
from contracts.ids import Incarnation, WorkerId
from contracts.layout import KVLayout

PROTOCOL = codec.WIRE_VERSION


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first frame of both ends.

    `role`: "prefill" for the one that connects, "decode" for the one that listens. `nonce`: 32 random bytes.
    """

    protocol: int
    worker_id: WorkerId
    incarnation: Incarnation
    role: str
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """An HMAC over both Hellos. The connecting end proves first, so that strangers get nothing to attack."""

    mac: bytes


class Terms(msgspec.Struct, frozen=True, tag="terms"):
    """The terms that each end has to offer.

    `num_blocks`: of all groups; `transport`: the one that its operator requested; `available`: those it could use;
    `boot_id`: of its kernel; `memory`: where its pages are, "host" or a kind of device; `plane_scales`: see
    device_pool.DevicePool; `levels`: of compression that its operator allows; `hears_fetched`: it knows that message.
    """

    layout: KVLayout
    num_blocks: int
    transport: str
    available: list[str]
    boot_id: str
    checksum: bool
    memory: str = "host"
    plane_scales: list[float] = []
    levels: list[str] = []
    hears_fetched: bool = False


class Open(msgspec.Struct, frozen=True, tag="open"):
    """The sender's proposal of a data channel. `session`: 16 random bytes that identify it."""

    transport: str
    session: bytes
    num_slots: int
    slot_nbytes: int
    params: bytes


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The receiver's acceptance of a data channel. `params`: what the sender's end needs to connect."""

    params: bytes


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """The sender's confirmation that its end of the channel works.

    The end is tried out where that is possible; no other channel is proposed.
    """


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """The refusal of one transport, by either end: another may be proposed."""

    reason: str


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """The first and only frame of a data socket."""

    session: bytes
    mac: bytes


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The end of a handshake by one end. `code`: of the error tree in contracts.errors."""

    code: str
    reason: str


ANY_FRAME = codec.decoder(Hello | Proof | Terms | Open | Opened | Settled | Declined | Attach | Rejected)
HANDOFF = codec.decoder(HandoffMessage)
