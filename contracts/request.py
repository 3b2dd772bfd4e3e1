"""A request as the workers know it: token ids in, no text."""

import msgspec

from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.sampling import SamplingParams


class WorkerRef(msgspec.Struct, frozen=True):
    """Where a worker is. `url`: its HTTP front. `transfer`: `host:port` of its KV control listener."""

    worker_id: WorkerId
    incarnation: Incarnation
    url: str
    transfer: str


class Route(msgspec.Struct, frozen=True):
    """Who serves a request. `prefill == decode` means that nothing is moved."""

    request_id: RequestId
    epoch: Epoch
    prefill: WorkerRef
    decode: WorkerRef

    @property
    def is_local(self) -> bool:
        return self.prefill.worker_id == self.decode.worker_id


class Job(msgspec.Struct, frozen=True, tag="job"):
    """Posted to both workers of the route at once; each finds its own part by its worker id.

    `timeout_s` is what is left of the request's budget when the job is sent: a span, because clocks differ between
    machines. Of jobs that wait, the one with the lowest `priority` goes first; within one, the one that came first.
    Only jobs with the same `cache_salt` find each other's prefixes. The last `num_answered` of `token_ids` are the
    answer's own: it was begun elsewhere, and goes on behind them.
    """

    route: Route
    gateway_id: GatewayId
    token_ids: list[int]
    sampling: SamplingParams
    timeout_s: float
    priority: int = 0
    cache_salt: str = ""
    num_answered: int = 0

    @property
    def request_id(self) -> RequestId:
        return self.route.request_id

    @property
    def epoch(self) -> Epoch:
        return self.route.epoch


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The one message that flows outward from the gateway besides Job. Idempotent; may come before its job."""

    request_id: RequestId
    epoch: Epoch
    reason: str


JobMessage = Job | Cancel
