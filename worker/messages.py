"""The messages between a worker's front and its engine core: msgpack frames on a socket pair."""

import math

import msgspec

from contracts.events import Event
from contracts.held_prefixes import HeldChange
from contracts.ids import Epoch, GatewayId, RequestId
from contracts.layout import KVLayout
from contracts.node import NodeLoad, TransferCapabilities
from contracts.request import AdapterRef, JobMessage, WorkerRef


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first frame from the front: the settings as JSON, and the identity of this worker."""

    settings: bytes
    worker_id: str
    incarnation: str


class Work(msgspec.Struct, frozen=True, tag="work"):
    """The jobs and cancels that the front has accepted.

    `taken_s`: when it did, by the monotonic clock that the processes of a host share; the core reads them between two
    steps.
    """

    jobs: list[JobMessage]
    taken_s: float


class GatewayGone(msgspec.Struct, frozen=True, tag="gateway_gone"):
    """The end of a gateway's event stream, after which its answers have no reader.

    `broken_s`: when, by the clock of Work. Answers to jobs that were taken later have another stream.
    """

    gateway_id: GatewayId
    broken_s: float = math.inf


class KnownPeers(msgspec.Struct, frozen=True, tag="peers"):
    """The workers that may receive KV from this one: links to them are opened before the first request."""

    workers: list[WorkerRef]


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """The request to load a LoRA adapter from a folder; AdapterReply of the same `number` answers it."""

    number: int
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """The request to forget an adapter; what runs with it goes on. AdapterReply answers it."""

    number: int
    name: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The request to end the core."""


ToCore = Start | Work | GatewayGone | KnownPeers | LoadAdapter | UnloadAdapter | Stop


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """The progress of start-up: `done` of `total`, in the unit of the stage."""

    stage: str
    done: int
    total: int


class CoreFailed(msgspec.Struct, frozen=True, tag="core_failed"):
    """The failure of the core to start; the message says what to do."""

    message: str


class CoreReady(msgspec.Struct, frozen=True, tag="core_ready"):
    """The report of a core that can serve, with the facts that the front publishes."""

    model: str
    layout: KVLayout
    transfer: str
    max_model_len: int
    capacity_tokens: int
    dtype: str
    capabilities: TransferCapabilities
    adapters: tuple[AdapterRef, ...] | None = None


class AdapterReply(msgspec.Struct, frozen=True, tag="adapter_reply"):
    """The answer to the request `number`: the adapters that are loaded now.

    `error`: why nothing was changed; empty if all went well.
    """

    number: int
    adapters: tuple[AdapterRef, ...]
    error: str = ""


class LevelStatus(msgspec.Struct, frozen=True):
    """The KV that crossed a link at one level of compression.

    `nbytes`: before; `wire_nbytes`: as it was sent; `seconds`: of coding at this end.
    """

    nbytes: int
    wire_nbytes: int
    seconds: float


class LinkStatus(msgspec.Struct, frozen=True):
    """The counters of the link to one peer. `nbytes_per_s` is 0.0 while unknown.

    `levels`: of a link that may compress, by name; "raw" is what was sent as it was.
    """

    peer: str
    outgoing: bool
    transport: str
    detail: str
    state: str
    counters: dict[str, float]
    nbytes_per_s: float = 0.0
    levels: dict[str, LevelStatus] = {}


class CoreStatus(msgspec.Struct, frozen=True):
    """A snapshot of the core.

    `num_turns` grows while its loop lives; `counters` only grow, `gauges` rise and fall. `broken`: why the core can't
    work any more and must be restarted; empty if it can.
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
    """The output of one turn of the loop.

    `held`: what changed of the prefixes that tiers below the KV cache hold.
    """

    events: dict[GatewayId, list[Event]]
    state_reports: list[tuple[RequestId, Epoch, str]]
    status: CoreStatus | None
    held: list[HeldChange] = []


ToFront = Loading | CoreFailed | CoreReady | AdapterReply | CoreFrame
