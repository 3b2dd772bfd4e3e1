"""The events that a TransferNode reports to its owner through `poll()`."""

from collections.abc import Mapping
from dataclasses import dataclass

from contracts.handoff import Abort, AbortAck, ChunkHeader, Commit, Fin, Grant, Offer, PrefixRequest, Refuse, Wait
from contracts.ids import Epoch, Incarnation, RequestId, WorkerId

PeerMessage = Offer | Grant | Wait | Refuse | Fin | Commit | Abort | AbortAck | PrefixRequest


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message of the peer.

    Fin may arrive before the last ChunkLanded: control messages and data travel on separate connections.
    """

    peer_id: WorkerId
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class ChunkLanded:
    """A chunk whose bytes are all in the granted pages, with the right checksum.

    `landed_s`: monotonic time of arrival. `header.loss` is of what lies in the pages.
    """

    peer_id: WorkerId
    header: ChunkHeader
    landed_s: float


@dataclass(frozen=True, slots=True)
class ChunkBad:
    """A chunk that is not, or only partly, in the pages; it may be sent again under the same index."""

    peer_id: WorkerId
    header: ChunkHeader
    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """The guarantee that no thread of this node reads or writes a page for this attempt from now on."""

    request_id: RequestId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """The loss of a peer: nothing of this incarnation reads or writes a page any more.

    All its attempts are over, without a Drained for each. `code`: one of the error tree in contracts.errors
    ("peer_lost", "auth_failed", "layout_mismatch", "config", ...). `fenced` is False only if a transfer thread did not
    stop in time: the pages must then stay in quarantine until the process ends.
    """

    peer_id: WorkerId
    incarnation: Incarnation
    error: str
    fenced: bool = True
    code: str = "peer_lost"


TransferEvent = MessageReceived | ChunkLanded | ChunkBad | Drained | PeerDisconnected


@dataclass(frozen=True, slots=True)
class LevelStats:
    """The messages of one level of compression on a link.

    `nbytes`: the KV in them; `wire_nbytes`: as it was sent; `seconds`: spent encoding, on an incoming link decoding.
    """

    nbytes: int = 0
    wire_nbytes: int = 0
    seconds: float = 0.0

    def plus(self, nbytes: int, wire_nbytes: int, seconds: float) -> "LevelStats":
        """Return the counters with one more message."""
        return LevelStats(self.nbytes + nbytes, self.wire_nbytes + wire_nbytes, self.seconds + seconds)


@dataclass(frozen=True, slots=True)
class LinkStats:
    """The counters of one link since it was made.

    `outgoing`: this node is the prefill end, which sends the pages. `transport`: the one in use; `detail`: its own
    description (for UCX, of the endpoint's lanes). `busy_s`: seconds spent packing and sending, or fetching, checking
    and writing pages, the device's time included, but not waiting for a chunk to be computed. `num_stale`: chunks
    discarded for want of a live grant. `nbytes_per_s`: rate of recently finished handoffs, 0.0 while unknown and on
    incoming links. `levels`: by name, on a link that may compress; "raw" is of messages that were not.
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
    levels: Mapping[str, LevelStats]
