"""A worker as the rest of the system sees it: who it is, and how busy."""

from enum import StrEnum

import msgspec

from contracts.ids import Incarnation, WorkerId
from contracts.layout import KVLayout
from contracts.request import WorkerRef


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker states once, when it joins. `max_model_len`: longest prompt plus answer it serves, in tokens.

    `layout`: what `layout_id` is the digest of, to say where two differ; None from older releases. `takes`: the ids of
    all layouts whose KV it can take, by re-sharding or rounding it; from older releases none, and only its own counts.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    url: str
    transfer: str
    model: str
    layout_id: str
    max_model_len: int
    capacity_tokens: int
    version: str
    pid: int
    core_pid: int
    layout: KVLayout | None = None
    takes: list[str] = []

    def can_take(self, source: "NodeInfo") -> bool:
        """The KV of `source`, as far as layouts tell."""
        return source.layout_id == self.layout_id or source.layout_id in self.takes

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.worker_id, self.incarnation, self.url, self.transfer)


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker states with each heartbeat. Rates are measured online, in tokens a second; 0.0 while unknown."""

    num_running: int = 0
    num_waiting: int = 0
    queue_tokens: int = 0
    free_tokens: int = 0
    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    transfer_rate: float = 0.0
    draining: bool = False


class Node(msgspec.Struct, frozen=True, kw_only=True):
    info: NodeInfo
    load: NodeLoad
    alive: bool
