"""What a worker's front and its engine core say to each other: msgpack frames on a socket pair."""

import msgspec

from contracts.events import Event
from contracts.ids import Epoch, GatewayId, RequestId
from contracts.layout import KVLayout
from contracts.node import NodeLoad, TransferCapabilities
from contracts.request import JobMessage, WorkerRef


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First frame from the front: the settings as JSON, and who this worker is."""

    settings: bytes
    worker_id: str
    incarnation: str


class Work(msgspec.Struct, frozen=True, tag="work"):
    """`taken_s`: when the front took them, by the monotonic clock that the processes of a host share. The core reads
    them between two steps.
    """

    jobs: list[JobMessage]
    taken_s: float


class GatewayGone(msgspec.Struct, frozen=True, tag="gateway_gone"):
    """Its event stream closed and did not come back: nobody reads the answers of its requests."""

    gateway_id: GatewayId


class KnownPeers(msgspec.Struct, frozen=True, tag="peers"):
    """Workers that this one may be asked to hand over to: links to them are opened before the first request."""

    workers: list[WorkerRef]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    pass


ToCore = Start | Work | GatewayGone | KnownPeers | Stop


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of start-up: `done` of `total`, in whatever unit the stage counts."""

    stage: str
    done: int
    total: int


class CoreFailed(msgspec.Struct, frozen=True, tag="core_failed"):
    """The core can't start; the message says what to do."""

    message: str


class CoreReady(msgspec.Struct, frozen=True, tag="core_ready"):
    model: str
    layout: KVLayout
    transfer: str
    max_model_len: int
    capacity_tokens: int
    dtype: str
    ways: TransferCapabilities


class LinkStatus(msgspec.Struct, frozen=True):
    """One peer of the handoff, as the transfer layer counts it. `nbytes_per_s` is 0.0 while unknown."""

    peer: str
    outgoing: bool
    transport: str
    detail: str
    state: str
    counters: dict[str, float]
    nbytes_per_s: float = 0.0


class CoreStatus(msgspec.Struct, frozen=True):
    """A picture of the core: `num_turns` grows while its loop lives; `counters` only grow, `gauges` come and go.

    `broken`: why it can't do its part any more and is to start anew, in words; empty if it can.
    """

    num_turns: int
    num_steps: int
    load: NodeLoad
    counters: dict[str, float]
    gauges: dict[str, float]
    links: list[LinkStatus]
    is_clean: bool
    broken: str = ""


class CoreFrame(msgspec.Struct, frozen=True, tag="frame"):
    """All that one turn of the loop produced."""

    events: dict[GatewayId, list[Event]]
    moves: list[tuple[RequestId, Epoch, str]]
    status: CoreStatus | None


ToFront = Loading | CoreFailed | CoreReady | CoreFrame
