"""The state of a worker's front: facts about itself and about its engine core."""

import asyncio
import math
import time
from dataclasses import dataclass, field

import msgspec

from contracts.node import NodeInfo, NodeLoad, WorkerRole
from process.thread_times import ThreadTimes, usable_s
from worker.front.adapter_calls import AdapterCalls
from worker.front.core_process import CoreProcess
from worker.front.event_streams import EventStreams
from worker.messages import CoreStatus

FORMER_SIDE = {WorkerRole.PREFILL: "requests_as_decode", WorkerRole.DECODE: "requests_as_prefill"}
"""The core's gauge of requests that a worker of this role is given no more of."""


@dataclass
class WorkerState:
    """The state of the front and its core.

    `status`: the core's latest report; `status_s` (monotonic): when one showed a new turn, shifted by `goes_on`.
    `due_s`: by when the front itself is to go on. `threads`: the core's, if it was silent at the last look.
    `num_joins`: how often it entered the registry. `is_broken`: the core must be restarted. `started_at_s`: wall-clock
    time.
    """

    info: NodeInfo
    secret: str
    core: CoreProcess
    streams: EventStreams
    hang_timeout_s: float
    config_digest: str
    status: CoreStatus | None = None
    status_s: float = field(default_factory=time.monotonic)
    due_s: float = math.inf
    threads: ThreadTimes | None = None
    joined: bool = False
    num_joins: int = 0
    draining: bool = False
    core_alive: bool = True
    is_broken: asyncio.Event = field(default_factory=asyncio.Event)
    started_at_s: float = field(default_factory=time.time)
    num_jobs: int = 0
    num_cancels: int = 0

    def __post_init__(self) -> None:
        self.adapter_calls = AdapterCalls(self.core)

    @property
    def load(self) -> NodeLoad:
        load = self.status.load if self.status is not None else NodeLoad()
        draining = self.draining or self.is_broken.is_set()
        return msgspec.structs.replace(load, draining=draining, num_of_former_role=self.num_of_former_role)

    @property
    def num_turns(self) -> int | None:
        """Return the turns of the core's loop by its latest report; None without one."""
        return self.status.num_turns if self.status is not None else None

    @property
    def num_requests(self) -> int:
        """Return how many requests the core has accepted and not yet ended."""
        return int(self.status.gauges["requests"]) if self.status is not None else 0

    @property
    def num_of_former_role(self) -> int:
        """Return how many requests run here on a side that this worker's role no longer has."""
        gauge = FORMER_SIDE.get(self.info.role)
        return int(self.status.gauges.get(gauge, 0)) if self.status is not None and gauge else 0

    def on_status(self, status: CoreStatus) -> None:
        """Record a status, which proves life only if the core's loop has turned since the last one."""
        if status.num_turns != self.num_turns:
            self.status_s = time.monotonic()
        self.status = status
        if status.broken:
            self.is_broken.set()

    @property
    def broken(self) -> str:
        """Return why the core must be restarted; empty if it need not be."""
        return self.status.broken if self.status is not None else ""

    def goes_on(self, period_s: float) -> None:
        """Leave out of the core's silence the time that it could not use; call again within `period_s`.

        That is the time for which this front stood still itself, as in a machine that was paused, and the time in which
        a busy host kept the CPUs from the core's threads.
        """
        now = time.monotonic()
        span_s = max(0.0, now - self.due_s + period_s)
        lost_s = max(0.0, span_s - period_s, span_s - self._usable_s(now, span_s))
        self.status_s = min(self.status_s + lost_s, now)
        self.due_s = now + period_s

    def _usable_s(self, now: float, span_s: float) -> float:
        """Return how much of `span_s` a silent core could have used; all of it for a core that turns."""
        before, self.threads = self.threads, None
        if now - self.status_s > span_s:
            self.threads = self.core.look_at_threads()
            if before is not None:
                return usable_s(before, self.threads, span_s)
        return span_s

    @property
    def silent_s(self) -> float:
        """Return the seconds for which the core has made no turn.

        Time after the front was to go on does not count: others may ask before it does.
        """
        return min(time.monotonic(), self.due_s) - self.status_s

    def health_error(self) -> str | None:
        """Return why this worker is not healthy, or None."""
        if not self.core_alive:
            return "the engine core has died"
        if (silent_s := self.silent_s) > self.hang_timeout_s:
            return f"the engine core has made no turn for {silent_s:.0f} s"
        return None
