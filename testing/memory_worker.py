"""A worker as the memory twin keeps it: what it said, and the credits taken on it."""

from collections import Counter
from dataclasses import dataclass, field

from contracts.node import Node, NodeInfo, NodeLoad
from coordinator.placement import policy as placement
from coordinator.store.store import WorkerCounts, WorkerView

PREFILL, DECODE = "prefill", "decode"
"""The sides of a route, and of its credits."""
FOREVER_MS = 1 << 53


@dataclass
class Worker:
    """One join of a worker, with the credits taken on it."""

    info: NodeInfo
    term: str
    alive_until_s: float
    load: NodeLoad = field(default_factory=NodeLoad)
    died_s: float | None = None
    tokens: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    num_answers: int = 0
    beyond_pending: int = 0
    beyond_reserved: int = 0
    idle_pending: int | None = None
    num_served_blocks: int = 0

    def beat(self, load: NodeLoad, alive_until_s: float) -> None:
        used_tokens = self.info.capacity_tokens - load.free_tokens if placement.is_busy(load) else 0
        self.beyond_pending = max(0, load.queue_tokens - self.tokens[PREFILL])
        self.beyond_reserved = max(0, used_tokens - self.tokens[DECODE])
        is_idle = placement.is_idle(load) and load.free_tokens >= self.info.capacity_tokens
        idle_before, self.idle_pending = self.idle_pending, self.tokens[PREFILL] if is_idle else None
        if idle_before is not None and self.idle_pending is not None:
            self.beyond_pending = -min(idle_before, self.idle_pending)
        self.load, self.alive_until_s = load, alive_until_s

    def die(self, now: float) -> None:
        self.died_s = now
        self.tokens.clear()
        self.requests.clear()
        self.num_answers = 0

    @property
    def counts(self) -> WorkerCounts:
        return WorkerCounts(
            term=self.term if self.died_s is None else "0",
            alive_until_ms=int(min(self.alive_until_s * 1000, FOREVER_MS)),
            is_draining=self.load.draining,
            pending_tokens=max(0, self.tokens[PREFILL] + self.beyond_pending),
            reserved_tokens=self.tokens[DECODE] + self.beyond_reserved,
            num_decodes=self.requests[DECODE],
            num_answers=self.num_answers,
            num_served_blocks=self.num_served_blocks,
        )

    def view(self, now: float) -> WorkerView:
        is_alive = self.died_s is None and now < self.alive_until_s
        return WorkerView(
            node=Node(info=self.info, load=self.load, alive=is_alive),
            pending_tokens=self.tokens[PREFILL],
            num_prefills=self.requests[PREFILL],
            reserved_tokens=self.tokens[DECODE],
            num_decodes=self.requests[DECODE],
            num_answers=self.num_answers,
        )
