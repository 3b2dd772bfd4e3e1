"""A request as the workers know it: token ids, and no text."""

import msgspec

from contracts.hashing import salted
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.sampling import SamplingParams


class WorkerRef(msgspec.Struct, frozen=True):
    """The addresses of a worker.

    `url` is its HTTP front, `transfer` (`host:port`) its KV control listener.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    url: str
    transfer: str


class AdapterRef(msgspec.Struct, frozen=True):
    """A LoRA adapter, by the name that clients give.

    `digest`: of its weights and configuration, 16 bytes.
    """

    name: str
    digest: bytes


class Route(msgspec.Struct, frozen=True):
    """The workers that serve a request; if `prefill == decode`, nothing is moved.

    `source` is another worker that may hold more of the prompt's KV than `prefill`, which can ask it for that.
    """

    request_id: RequestId
    epoch: Epoch
    prefill: WorkerRef
    decode: WorkerRef
    source: WorkerRef | None = None

    @property
    def is_local(self) -> bool:
        return self.prefill.worker_id == self.decode.worker_id


def chain_start(cache_salt: str, adapter: AdapterRef | None) -> bytes:
    """Return the start of the hash chain of prompts with this salt.

    `adapter`: what computes them, None for the model alone.
    """
    return salted(cache_salt, b"" if adapter is None else adapter.digest)


class Job(msgspec.Struct, frozen=True, tag="job"):
    """A request, posted to both workers of the route at once; each finds its own part by its worker id.

    In a migration (`is_migration`) the route's `prefill` is the worker that decodes the answer under an earlier epoch.
    It sends the KV to `decode`, and goes on until that has committed.

    `timeout_s` is what is left of the request's budget when the job is sent: a span, because clocks differ between
    machines. Among waiting jobs the one with the lowest `priority` goes first, and of equal ones the one that came
    first; of different tenants the one that has had less for its `weight`. Only jobs with the same `cache_salt` and
    `adapter` share prefixes; the latter is None for the model alone. The last `num_answered` of `token_ids` belong to
    the answer, which was begun elsewhere and goes on after them.
    """

    route: Route
    gateway_id: GatewayId
    token_ids: list[int]
    sampling: SamplingParams
    timeout_s: float
    priority: int = 0
    cache_salt: str = ""
    num_answered: int = 0
    is_migration: bool = False
    tenant: str = ""
    weight: float = 1.0
    adapter: AdapterRef | None = None

    @property
    def chain_start(self) -> bytes:
        """Return the start of its prompt's hash chain, see contracts.hashing.salted."""
        return chain_start(self.cache_salt, self.adapter)

    @property
    def request_id(self) -> RequestId:
        return self.route.request_id

    @property
    def epoch(self) -> Epoch:
        return self.route.epoch


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The end of a request before its time. It is idempotent, and may come before its job."""

    request_id: RequestId
    epoch: Epoch
    reason: str


class CancelMigration(msgspec.Struct, frozen=True, tag="cancel_migration"):
    """The end of the migration under `epoch`, posted to its source.

    The answer goes on there, under its own epoch. Idempotent. A source that has handed the answer over has sent Moved.
    """

    request_id: RequestId
    epoch: Epoch
    reason: str


JobMessage = Job | Cancel | CancelMigration
