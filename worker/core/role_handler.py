"""The attempt to serve a request, and the role that serves it: a side of the handoff, or both at once."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Protocol

from contracts.events import Token
from contracts.ids import Epoch, RequestId
from contracts.kv_loss import EXACT
from contracts.request import Job
from engine.messages import ChunkScheduled, EngineRequest, StepOutput
from kv_transfer.events import TransferEvent

AttemptId = tuple[RequestId, Epoch]
StepKind = Literal["decode", "mixed", "prefill"]

MAX_RECENT_TOKENS = 64
"""The newest tokens of an answer that are kept: a migration takes along those that its gateway has not read."""


def attempt_key(request_id: RequestId, epoch: Epoch) -> RequestId:
    """Return the engine's id of one attempt, distinct from that of an earlier epoch still draining."""
    return RequestId(f"{request_id}.{epoch}")


@dataclass
class Attempt:
    """An attempt between acceptance and end.

    `stages_s`: its time account on this worker, stage -> seconds. `has_sent_stages`: the gateway has been sent the
    times up to the first token. `longest_step_s` and `longest_step_kind`: the longest engine step since its first
    token, none while the kind is empty.
    `recent`: the newest tokens that were sent to the gateway. `loss`: of cached KV that a prompt may use which is
    computed here, see contracts.kv_loss. `late_s`: see EngineRequest.
    """

    job: Job
    deadline_s: float
    mark_s: float
    role: "RoleHandler | None" = None
    cached_tokens: int = 0
    stages_s: dict[str, float] = field(default_factory=dict)
    has_sent_stages: bool = False
    longest_step_s: float = 0.0
    longest_step_kind: StepKind | Literal[""] = ""
    recent: deque[Token] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_TOKENS))
    loss: str = EXACT
    late_s: float = 0.0

    @property
    def taken_s(self) -> float:
        """Return when its job was taken; see messages.Work."""
        return self.deadline_s - self.job.timeout_s

    @property
    def id(self) -> AttemptId:
        return self.job.request_id, self.job.epoch

    @property
    def key(self) -> RequestId:
        """Return the engine's id of this attempt."""
        return attempt_key(self.job.request_id, self.job.epoch)

    def request(self, handoff: bool = False, loss: str | None = None) -> EngineRequest:
        """Return the job as a request of the engine. `loss`: instead of the attempt's own."""
        job = self.job
        return EngineRequest(
            request_id=self.key,
            token_ids=job.token_ids,
            sampling=job.sampling,
            handoff=handoff,
            priority=job.priority,
            cache_salt=job.cache_salt,
            num_answered=job.num_answered,
            loss=self.loss if loss is None else loss,
            late_s=self.late_s,
            tenant=job.tenant,
            weight=job.weight,
            adapter=job.adapter,
        )

    def is_first(self, token: Token) -> bool:
        """Return whether the token is the first that this attempt samples."""
        return token.index == self.job.num_answered

    def stage(self, name: str, now: float) -> None:
        """End the stage that began at the last mark."""
        self.stages_s[name] = self.stages_s.get(name, 0.0) + now - self.mark_s
        self.mark_s = now

    def count_step(self, kind: StepKind, span_s: float) -> None:
        """Account an engine step that its answer waited for."""
        if span_s > self.longest_step_s:
            self.longest_step_s, self.longest_step_kind = span_s, kind

    def account(self) -> dict[str, float]:
        """Return its stages, and its longest step as `longest_KIND_step`."""
        longest = {f"longest_{self.longest_step_kind}_step": self.longest_step_s} if self.longest_step_kind else {}
        return self.stages_s | longest


class RoleHandler(Protocol):
    """A way of serving jobs.

    Every method runs on the core's loop and returns at once; `now` is monotonic seconds.
    """

    def accepts(self, job: Job) -> bool:
        """Return whether this role serves the job."""
        ...

    def start(self, attempt: Attempt, now: float) -> None:
        """Begin an accepted job. Raises a TandemError to refuse it."""
        ...

    def drop(self, attempt: Attempt, reason: str, now: float) -> None:
        """Free what the request holds here; its end is reported elsewhere."""
        ...

    def on_started(self, attempt: Attempt, now: float) -> None:
        """Handle a request that the scheduler picked; its first chunk is about to be computed."""
        ...

    def on_chunk_scheduled(self, attempt: Attempt, chunk: ChunkScheduled) -> None:
        """Handle a chunk of the request's handoff that is about to be computed."""
        ...

    def on_step(self, output: StepOutput, now: float) -> None:
        """Handle the output of a step whose tokens are already on their way to the gateway.

        `ended` requests are still in the attempt table.
        """
        ...

    def on_transfer(self, event: TransferEvent, now: float) -> None: ...

    def advance(self, now: float) -> None:
        """Go on with what other threads have done; called at every turn of the core."""
        ...

    def on_tick(self, now: float) -> None: ...

    def counters(self) -> dict[str, float]:
        """Return counters of this role's work by metric name; they only grow."""
        ...

    def is_idle(self) -> bool:
        """Return whether this role holds no request and no page."""
        ...
