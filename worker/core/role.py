"""The roles of a core for a request: a side of the handoff, or both at once."""

from typing import Protocol

from contracts.request import Job
from engine.messages import ChunkScheduled, StepOutput
from kv_transfer.events import TransferEvent
from worker.core.attempt_table import Attempt


class RoleHandler(Protocol):
    """A way of serving jobs.

    Every method runs on the core's loop and returns at once; `now` is monotonic seconds.
    """

    def accepts(self, job: Job) -> bool:
        """Return whether this role serves the job."""
        ...

    def start(self, live: Attempt, now: float) -> None:
        """Begin an accepted job. Raises a TandemError to refuse it."""
        ...

    def drop(self, live: Attempt, reason: str, now: float) -> None:
        """Free what the request holds here; its end is reported elsewhere."""
        ...

    def on_started(self, live: Attempt, now: float) -> None:
        """Handle a request that the scheduler picked; its first chunk is about to be computed."""
        ...

    def on_chunk_scheduled(self, live: Attempt, chunk: ChunkScheduled) -> None:
        """Handle a chunk of the request's handoff that is about to be computed."""
        ...

    def on_step(self, output: StepOutput, now: float) -> None:
        """Handle the output of a step whose tokens are already on their way to the gateway.

        `ended` requests are still in the attempt table.
        """
        ...

    def on_transfer(self, event: TransferEvent, now: float) -> None: ...

    def on_tick(self, now: float) -> None: ...

    def counters(self) -> dict[str, float]:
        """Return counters of this role's work by metric name; they only grow."""
        ...

    def hands_over_alone(self) -> bool:
        """Return whether all work here is one prompt whose pages decode will fetch itself."""
        ...

    def is_idle(self) -> bool:
        """Return whether this role holds no request and no page."""
        ...
