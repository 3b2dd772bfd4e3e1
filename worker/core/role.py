"""What a core can be for a request: the sides of the handoff, or both at once."""

from typing import Protocol

from contracts.request import Job
from engine.messages import ChunkScheduled, StepOutput
from kv_transfer.events import TransferEvent
from worker.core.attempt_table import Attempt


class RoleHandler(Protocol):
    """One way of serving jobs. Every method runs on the core's loop and returns at once; `now` is monotonic seconds."""

    def accepts(self, job: Job) -> bool:
        """Whether this role serves the job."""
        ...

    def start(self, live: Attempt, now: float) -> None:
        """Begin an accepted job. Raises a TandemError to refuse it."""
        ...

    def drop(self, live: Attempt, reason: str, now: float) -> None:
        """Free what the request holds here; its end is told elsewhere."""
        ...

    def on_started(self, live: Attempt, now: float) -> None:
        """The scheduler picked the request; its first chunk is about to be computed."""
        ...

    def on_chunk_scheduled(self, live: Attempt, chunk: ChunkScheduled) -> None:
        """A chunk of the request's handoff is about to be computed."""
        ...

    def on_step(self, output: StepOutput, now: float) -> None:
        """After a step, its tokens already on their way to the gateway; `ended` requests are still in the ledger."""
        ...

    def on_transfer(self, event: TransferEvent, now: float) -> None: ...

    def on_tick(self, now: float) -> None: ...

    def counters(self) -> dict[str, float]:
        """What this role has done, by metric name; only grows."""
        ...

    def hands_over_alone(self) -> bool:
        """All that is under way here is one prompt, whose pages decode is to fetch by itself."""
        ...

    def is_idle(self) -> bool:
        """No request and no page is in this role's hands."""
        ...
