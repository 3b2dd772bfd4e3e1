"""The refusals of the coordinator, in the same words whichever part or store says them."""

from contracts.errors import Overloaded, RequestError, TandemError, Unavailable
from contracts.ids import Epoch, RequestId, WorkerId

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""The bounds of the time after which who is refused may come again."""


def no_worker(side: str) -> TandemError:
    return Unavailable(f"no live {side} worker that takes work")


def no_pair() -> TandemError:
    return Unavailable("no decode worker can take the KV of a prefill worker; GET /ready says where they differ")


def too_long(num_tokens: int, most_tokens: int) -> TandemError:
    return RequestError(f"a prompt of {num_tokens} tokens; no worker takes more than {most_tokens}")


def not_known(worker_id: WorkerId) -> TandemError:
    return Unavailable(f"the registry does not know worker {worker_id!r} now; it joins again within a second or two")


def last_of(side: str, worker_id: WorkerId) -> TandemError:
    what = {"prefill": "compute prompts", "decode": "produce answers"}[side]
    return RequestError(f"without {worker_id!r} no worker of the pool would {what}: give another one that role first")


def superseded(worker_id: WorkerId) -> TandemError:
    return Unavailable(f"worker id {worker_id!r} belongs to a newer process; give this one another id")


def stale(request_id: RequestId, epoch: Epoch) -> TandemError:
    return Unavailable(f"request {request_id} has ended, or is past attempt {epoch}")


def overloaded(side: str, wait_s: float) -> Overloaded:
    return Overloaded(f"all {side} workers are full", min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))
