"""What the store's twin in memory keeps of a request."""

from dataclasses import dataclass, field

from contracts.ids import Epoch, GatewayId, WorkerId
from coordinator.request_states import RequestState
from coordinator.store.store import Claim, MigrationClaim
from testing.memory_worker import DECODE, PREFILL, Worker


@dataclass
class Credit:
    worker: Worker
    num_tokens: int


@dataclass
class Record:
    """A request, or (without `gateway_id`) the end of one that nobody knows.

    `credits`: what is held now, by side; `route`: who serves it. `destination`: what a migration holds.
    """

    gateway_id: GatewayId
    epoch: Epoch
    state: RequestState | None = None
    credits: dict[str, Credit] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    destination: tuple[Credit, MigrationClaim] | None = None
    lease_until_s: float = 0.0
    ended_s: float = 0.0
    is_reaped: bool = False

    def lives(self, request: Claim) -> bool:
        """Its gateway knows better than whoever reaped it: the store was away for longer than a lease."""
        return self.is_reaped and self.gateway_id == request.gateway_id and self.epoch < request.epoch


def count_answer(record: Record, by: int) -> None:
    """Count an answer where it decodes, if its prompt is computed."""
    held = record.credits.get(DECODE)
    if held is not None and PREFILL not in record.credits and held.worker.died_s is None:
        held.worker.num_answers += by


def claimed_worker(claim: MigrationClaim) -> tuple[WorkerId, str]:
    """Return the worker, and its join, that a migration claims."""
    return claim.worker.worker_id, claim.worker.term
