"""In place of sockets: what a dispatch sends waits until the test decides about it."""

import asyncio
from dataclasses import dataclass, field

from contracts.ids import Incarnation, WorkerId
from contracts.node import NodeInfo, NodeLoad, WorkerRole
from contracts.request import AdapterRef, Cancel, Job, WorkerRef
from contracts.sampling import SamplingParams
from coordinator.store.store import Store
from gateway.prompting.generation_request import GenerationRequest
from tests.nodes import ways

PROMPT = [5, 6, 7]


@dataclass
class Wires:
    """The connections to all workers."""

    sends: list[tuple[WorkerRef, Job | Cancel, asyncio.Future[None]]] = field(default_factory=list)
    silent: list[WorkerId] = field(default_factory=list)
    strange: list[WorkerId] = field(default_factory=list)

    async def send(self, worker: WorkerRef, message: Job | Cancel) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sends.append((worker, message, future))
        await future

    def ref(self, worker_id: WorkerId) -> WorkerRef:
        return WorkerRef(worker_id, Incarnation("1"), "", "")

    def can_serve(self) -> bool:
        return True

    def lacking(self, adapter: AdapterRef | None) -> list[WorkerId]:
        return []

    async def stop(self) -> None:
        """Nothing to stop."""


async def join(store: Store, workers: dict[str, WorkerRole]) -> None:
    """All of them can exchange KV with each other."""
    for name, role in workers.items():
        await store.join(_info(name, role))
        await store.heartbeat(WorkerId(name), Incarnation("1"), NodeLoad(free_tokens=1 << 20))


def ask(total: int) -> GenerationRequest:
    """For an answer of `total` tokens to PROMPT."""
    sampling = SamplingParams(max_tokens=total, seed=1, logprobs=0)
    return GenerationRequest(0, 0, PROMPT, sampling, (), False, False)


def _info(name: str, role: WorkerRole) -> NodeInfo:
    return NodeInfo(
        worker_id=WorkerId(name),
        incarnation=Incarnation("1"),
        role=role,
        url="",
        transfer="",
        model="m",
        layout_id="l",
        max_model_len=2048,
        capacity_tokens=1 << 20,
        version="0",
        pid=1,
        core_pid=1,
        ways=ways("l"),
    )
