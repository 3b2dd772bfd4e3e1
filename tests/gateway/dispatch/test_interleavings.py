"""Dispatch and sequencer under every interleaving that a generator finds: sends that hang, are taken or refused,
workers that are lost, events doubled, shuffled, stale, false, or late, clients that leave. No sockets."""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import Overloaded, TandemError, Unavailable
from contracts.events import Event, Failed, Finished, FinishReason, Prefilled, Token, Tokens
from contracts.ids import GatewayId, Incarnation, RequestId, WorkerId
from contracts.node import WorkerRole
from contracts.request import Job
from coordinator.store.store import Claim, Claimed
from gateway.dispatch.attempt_budget import MAX_REPLAYS
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.registry_client import StorePlacement
from gateway.generation.generation_state import GenerationState, OutputDelta
from gateway.prompting.chat_template import Prompting
from testing.memory_store import MemoryStore
from tests.coordinator.coordinator_rig import reap
from tests.gateway.gateway_wires import PROMPT, Wires, ask, join

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("at_once")]

WORKERS = {"p0": WorkerRole.PREFILL, "d0": WorkerRole.DECODE, "m0": WorkerRole.MIXED, "m1": WorkerRole.MIXED}


@pytest.fixture(scope="module")
def prompting(checkpoint):
    return Prompting(checkpoint)


def token_id(epoch: int, index: int) -> int:
    """Tells the attempts apart."""
    return 1000 * epoch + index


@dataclass
class Client:
    pieces: list[OutputDelta] = field(default_factory=list)
    left_after: int | None = None
    error: TandemError | None = None

    @property
    def token_ids(self) -> list[int]:
        return [shown.token.token_id for piece in self.pieces for shown in piece.shown]

    @property
    def num_ends(self) -> int:
        return sum(piece.finish is not None or piece.failed is not None for piece in self.pieces)


class FlakyStore(MemoryStore):
    """Takes its time. A place for a later attempt is now and then not given, or given and the answer lost."""

    def __init__(self, random: Random, clock: Callable[[], float]) -> None:
        super().__init__(alive_s=math.inf, clock=clock)
        self._random = random

    async def claim(self, claim: Claim, prefixes: Sequence[tuple[bytes, bytes]] = ()) -> Claimed:
        for _ in range(self._random.randint(0, 3)):
            await asyncio.sleep(0)
        chance = self._random.random() if claim.epoch > 1 else 1.0
        if chance < 0.15:
            raise Unavailable("Redis is away")
        claimed = await super().claim(claim, prefixes)
        if chance < 0.3:
            raise Unavailable("Redis went away")
        return claimed


class Storm:
    """Requests of a few tokens, and one random thing after another."""

    def __init__(self, prompting: Prompting, random: Random) -> None:
        self.random, self.prompting = random, prompting
        self.now_s = 0.0
        self.store, self.wires = FlakyStore(random, lambda: self.now_s), Wires()
        self.dispatch = Dispatcher(StorePlacement(self.store, GatewayId("g")), GatewayId("g"), "s", "m")
        self.dispatch.workers = self.wires  # type: ignore[assignment]
        self.clients: dict[RequestId, Client] = {}
        self.events: list[tuple[WorkerId, Event]] = []
        self.totals: dict[RequestId, int] = defaultdict(lambda: random.randint(1, 5))

    async def run(self, num_steps: int) -> None:
        await join(self.store, WORKERS)
        steps = [self._begin, self._decide, self._decide, self._deliver, self._deliver, self._lose, self._leave]
        for _ in range(num_steps):
            self.random.choice(steps)()
            for _ in range(self.random.randint(0, 3)):
                await asyncio.sleep(0)
        await self._calm()

    def _begin(self) -> None:
        request_id = RequestId(f"r{len(self.clients)}")
        client = self.clients[request_id] = Client()
        answer = GenerationState(ask(self.totals[request_id]), self.prompting, ())
        self.dispatch._spawn(self._place(request_id, answer, client))

    async def _place(self, request_id: RequestId, answer: GenerationState, client: Client) -> None:
        try:
            await self.dispatch.begin(request_id, answer, client.pieces.append, time.monotonic() + 60)
        except TandemError as error:
            client.error = error

    def _decide(self) -> None:
        """One send arrives, is refused, or both: the worker took the job and its reply was lost."""
        if not self.wires.sends:
            return
        ref, message, future = self.wires.sends.pop(self.random.randrange(len(self.wires.sends)))
        verdict = self.random.choice(["taken", "taken", "refused", "both"])
        if isinstance(message, Job) and verdict != "refused":
            self.events += [(ref.worker_id, event) for event in self._answer_of(ref.worker_id, message)]
        if verdict == "taken":
            future.set_result(None)
        else:
            future.set_exception(self.random.choice([Unavailable("no"), Overloaded("full")]))

    def _answer_of(self, worker_id: WorkerId, job: Job) -> list[Event]:
        request_id, epoch, total = job.request_id, job.epoch, self.totals[job.request_id]
        answered = job.token_ids[len(PROMPT) :]
        assert (len(answered), job.token_ids[: len(PROMPT)]) == (job.num_answered, PROMPT)
        assert (
            answered[: len(self.clients[request_id].token_ids)] == self.clients[request_id].token_ids[: len(answered)]
        )
        first = len(answered) + (job.route.prefill.worker_id != worker_id)
        tokens = [Tokens(request_id, epoch, [_token(epoch, index)]) for index in range(first, total)]
        whole = [
            Prefilled(request_id, epoch, 0, {}),
            *tokens,
            Finished(request_id, epoch, total, FinishReason.LENGTH, {}),
        ]
        match self.random.randrange(8):
            case 0:
                return [*whole, Failed(request_id, epoch, "internal", "late")]
            case 1:
                return [*whole[:-1], Finished(request_id, epoch, self.random.randint(0, 9), FinishReason.LENGTH, {})]
            case 2:
                return [*tokens, Tokens(request_id, epoch, [Token(total - 1, -1, -0.5)])]
            case 3:
                return [event for event in whole if self.random.random() < 0.7]
        return whole

    def _deliver(self) -> None:
        """Mostly in order; sometimes again, sometimes the wrong one first."""
        if not self.events:
            return
        at = self.random.choice([0, 0, 0, self.random.randrange(len(self.events))])
        event = self.events[at] if self.random.random() < 0.2 else self.events.pop(at)
        self.dispatch._on_event(*event)

    def _lose(self) -> None:
        if self.random.random() < 0.2:
            worker_id = WorkerId(self.random.choice(list(WORKERS)))
            self.wires.silent = self.random.choice([[], [worker_id]])
            self.dispatch._on_lost(worker_id, Incarnation("1"), "test")

    def _leave(self) -> None:
        if self.clients and self.random.random() < 0.3:
            self._cancel(self.random.choice(list(self.clients)))

    def _cancel(self, request_id: RequestId) -> None:
        client = self.clients[request_id]
        is_live = request_id in self.dispatch._live
        self.dispatch.cancel(request_id, "left")
        if is_live:
            client.left_after = len(client.pieces)

    async def _calm(self) -> None:
        """All sends are decided, all events delivered; what is still open then meets its deadline. Or the gateway stops
        in the midst of it.
        """
        if self.random.random() < 0.5:
            stopping = asyncio.create_task(self.dispatch.stop())
            await self._until(stopping.done)
        else:
            await self._until(lambda: all(task.done() for task in self.dispatch._tasks))
        for request_id in list(self.clients):
            self._cancel(request_id)
        await self._until(lambda: not self.dispatch._tasks)
        self.now_s += 60.0  # leases of places that were given unheard
        await reap(self.store)

    async def _until(self, is_done: Callable[[], bool]) -> None:
        while self.wires.sends or self.events or not is_done():
            self._decide()
            self._deliver()
            await asyncio.sleep(0)


def _token(epoch: int, index: int) -> Token:
    return Token(index, token_id(epoch, index), -0.5, [])


@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 150))
@settings(max_examples=300)
def test_one_end_each_token_once_and_nothing_left(prompting, seed, num_steps):
    asyncio.run(_check(Storm(prompting, Random(seed)), num_steps))


async def _check(storm: Storm, num_steps: int) -> None:
    await storm.run(num_steps)
    for request_id, client in storm.clients.items():
        _check_client(client, storm.totals[request_id])
    assert storm.dispatch.num_inflight == 0
    assert {(w.pending_tokens, w.reserved_tokens) for w in await storm.store.workers()} == {(0, 0)}
    counts = await storm.store.counts()
    assert counts.states == {}
    errors = [client.error for client in storm.clients.values()]
    num_late = sum("shuts down" in str(error) for error in errors)  # placed by then, or not
    assert 0 <= sum(counts.ended.values()) - errors.count(None) <= num_late
    finished = sum(piece.finish is not None for client in storm.clients.values() for piece in client.pieces)
    assert counts.ended.get("FINISHED", 0) == finished


def _check_client(client: Client, total: int) -> None:
    if client.error is not None:
        assert not client.pieces
        return
    if client.left_after is not None:
        assert (client.num_ends, len(client.pieces)) == (0, client.left_after)
    else:
        assert client.num_ends == 1
        assert client.pieces[-1].finish is not None or client.pieces[-1].failed is not None
    seen = client.token_ids
    epochs = [found // 1000 for found in seen]
    assert seen == [token_id(epoch, index) for index, epoch in enumerate(epochs)] and epochs == sorted(epochs)
    assert len(set(epochs)) <= 1 + MAX_REPLAYS
    if client.pieces and client.pieces[-1].finish is not None:
        assert client.pieces[-1].num_tokens == len(seen)
