"""What a TransferNode tells its owner, through `poll()`."""

from dataclasses import dataclass

from contracts.handoff import Abort, AbortAck, ChunkHeader, Commit, Fin, Grant, Offer, Refuse, Wait
from contracts.ids import Epoch, Incarnation, RequestId, WorkerId

PeerMessage = Offer | Grant | Wait | Refuse | Fin | Commit | Abort | AbortAck


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """The peer said so. Fin may come before the last ChunkLanded: control and data travel apart."""

    peer_id: WorkerId
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class ChunkLanded:
    """All bytes of this chunk are in the granted pages, and their checksum is right, since `landed_s` (monotonic)."""

    peer_id: WorkerId
    header: ChunkHeader
    landed_s: float


@dataclass(frozen=True, slots=True)
class ChunkBad:
    """The chunk is not in the pages, or not wholly; it may be sent again under the same index."""

    peer_id: WorkerId
    header: ChunkHeader
    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """No thread of this node reads or writes a page for this attempt from now on."""

    request_id: RequestId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """Nothing of this incarnation of the peer reads or writes a page any more; all its attempts are over, without
    Drained.

    `code`: that of the error tree in contracts.errors ("peer_lost", "auth_failed", "layout_mismatch", "config", ...).
    `fenced` is False only if a transfer thread did not stop in time: the pages must then stay in quarantine for good.
    """

    peer_id: WorkerId
    incarnation: Incarnation
    error: str
    fenced: bool = True
    code: str = "peer_lost"


TransferEvent = MessageReceived | ChunkLanded | ChunkBad | Drained | PeerDisconnected


@dataclass(frozen=True, slots=True)
class LinkStats:
    """One link: pages go from `sender` to `receiver`; `outgoing` if we are the sender. Counts are since the link was
    made.

    `transport`: the one in use; `detail`: how it describes itself (for UCX, its own words on the endpoint's lanes).
    `busy_s`: seconds spent packing and sending, or fetching, checking and landing, the device's own included; never
    waiting for a chunk to be computed. `num_stale`: chunks thrown away for want of
    a live grant. `nbytes_per_s`: of handoffs that finished lately, 0.0 while unknown and on incoming links.
    """

    peer_id: WorkerId
    incarnation: Incarnation
    outgoing: bool
    state: str
    transport: str
    detail: str
    nbytes: int
    num_chunks: int
    busy_s: float
    num_bad: int
    num_stale: int
    nbytes_per_s: float
