"""A gateway on a loopback port, with fake workers and a store of a few lines."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from threading import Lock
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from tokenizers import Tokenizer

from checkpoint import Checkpoint
from contracts.errors import Overloaded, Unavailable
from contracts.ids import Epoch, GatewayId, RequestId, WorkerId
from contracts.node import Node, WorkerRole
from contracts.request import Route
from coordinator.request_states import RequestState
from coordinator.store.store import Store
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.registry_client import StorePlacement
from gateway.grammar.compile_sandbox import START_S, CompileSandbox
from gateway.http.app import make_app
from gateway.http.context import AppContext
from gateway.http.server import Protocol
from gateway.observability.metrics import Metrics
from gateway.prompting.chat_template import Prompting
from gateway.settings import GatewaySettings
from gateway.tenants.tenant_watch import open_tenants
from gateway.tool_calling.registry import ParserName
from process.deep_stack_threads import DeepThreads
from process.sockets import listen
from service.server import UvicornServer
from testing.fake_worker import FakeWorker
from tests.waiting import async_until

SECRET = "s"
GATEWAY = GatewayId("g")


@dataclass
class ListStore:
    """Places on the first worker of each role that is not excluded, at most `room` answers at once."""

    workers: Sequence[FakeWorker]
    overloaded: bool = False
    room: int | None = None
    placed: list[tuple[RequestId, Epoch]] = field(default_factory=list)
    finished: list[tuple[RequestId, Epoch]] = field(default_factory=list)
    ends: list[RequestState] = field(default_factory=list)
    renewed: set[RequestId] = field(default_factory=set)
    dead: set[WorkerId] = field(default_factory=set)
    rooms: list[float] = field(default_factory=list)

    async def nodes(self) -> list[Node]:
        return [msgspec.structs.replace(w.node, alive=w.worker_id not in self.dead) for w in self.workers]

    async def place(
        self,
        request_id: RequestId,
        epoch: Epoch,
        token_ids: Sequence[int],
        max_tokens: int,
        exclude: Sequence[WorkerId],
        chain_start: bytes = b"",
        room: float = 1.0,
    ) -> Route:
        self.rooms.append(room)
        num_there = len({name for name, _ in self.placed} - {name for name, _ in self.finished})
        if self.overloaded or (self.room is not None and num_there >= self.room):
            raise Overloaded("full", retry_after_s=3)
        self.placed.append((request_id, epoch))
        return Route(request_id, epoch, self._pick(WorkerRole.PREFILL, exclude), self._pick(WorkerRole.DECODE, exclude))

    def _pick(self, role: WorkerRole, exclude: Sequence[WorkerId]):
        fit = [w for w in self.workers if w.role in (role, WorkerRole.MIXED) and w.worker_id not in exclude]
        if not fit:
            raise Unavailable(f"no {role} worker")
        return fit[0].node.info.ref

    async def finish(self, request_id: RequestId, epoch: Epoch, end: RequestState) -> None:
        self.finished.append((request_id, epoch))
        self.ends.append(end)

    async def renew(self, request_ids: Sequence[RequestId]) -> None:
        self.renewed.update(request_ids)

    async def close(self) -> None:
        pass


@dataclass
class Rig:
    url: str
    front: AppContext
    store: Any
    workers: Sequence[FakeWorker]
    server: UvicornServer

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=60)

    async def until(self, condition) -> None:
        await async_until(condition, 60.0)

    async def leave(self, client: httpx.AsyncClient, body: dict, once) -> None:
        """Ask, and hang up when it has come so far."""
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await self.until(once)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    def is_idle(self) -> bool:
        ended = sorted(set(self.store.placed)) and len(self.store.finished) == len({i for i, _ in self.store.placed})
        return self.front.dispatch.num_inflight == 0 and bool(ended) and not any(w.num_running for w in self.workers)


def pair(**options) -> list[FakeWorker]:
    roles = {"p0": WorkerRole.PREFILL, "d0": WorkerRole.DECODE}
    return [FakeWorker(WorkerId(name), role, SECRET, **options) for name, role in roles.items()]


@asynccontextmanager
async def gateway(checkpoint: Checkpoint, workers: list[FakeWorker], **settings) -> AsyncIterator[Rig]:
    """With a store that is a list."""
    store = ListStore(workers)
    async with _running(checkpoint, workers, store, **settings) as rig:
        yield rig


@asynccontextmanager
async def coordinated(checkpoint: Checkpoint, workers: Sequence[FakeWorker], store: Store, **settings):
    """With the coordinator's own store, which the workers have joined."""
    async with _running(checkpoint, workers, StorePlacement(store, GATEWAY), join=store.join, **settings) as rig:
        yield rig


@asynccontextmanager
async def _running(checkpoint: Checkpoint, workers: Sequence[FakeWorker], store, join=None, **settings):
    for worker in workers:
        worker.model = checkpoint.name
        await worker.start()
        if join is not None:
            await join(worker.node.info)
    dispatch = Dispatcher(store, GATEWAY, SECRET, checkpoint.name)
    given = GatewaySettings(secret=SECRET, **settings)  # type: ignore[arg-type]
    prompting = _prompting(checkpoint, given.tool_parser)
    checkpoint = _with_shared_tokenizer(checkpoint)
    tenants = open_tenants(given.tenants)
    front = AppContext(
        given,
        checkpoint,
        prompting,
        dispatch,
        Metrics(dispatch, checkpoint.name, "0", tenants=tenants),
        checkpoint.name,
        "0",
        0,
        tenants=tenants,
    )
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(make_app(front), http=Protocol, log_level="warning", timeout_graceful_shutdown=1)
    server = UvicornServer(config)
    await dispatch.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    rig = Rig(f"http://127.0.0.1:{listener.getsockname()[1]}", front, store, workers, server)
    try:
        await rig.until(lambda: server.started and len(dispatch.workers.nodes) == len(workers))
        yield rig
    finally:
        server.should_exit = True
        await dispatch.stop()
        await serving
        front.prompting.close()
        for worker in workers:
            await worker.stop()


def _prompting(checkpoint: Checkpoint, parser: ParserName) -> Prompting:
    """Return a gateway's prompting, with threads and verdicts on grammars of its own.

    What it reads out of vocabulary and templates is that of all gateways of the model, since that takes longer than
    the rest of their start.
    """
    prompting = copy(_read_prompting(checkpoint, parser))
    prompting._huge = ThreadPoolExecutor(1, "huge-prompt")
    prompting.compilers = DeepThreads(4, "grammar")
    prompting.trials = KeptSandbox(_with_shared_tokenizer(checkpoint))
    return prompting


class KeptSandbox(CompileSandbox):
    """A sandbox that leaves its process to the next gateway of the model: to start one takes a second of CPU."""

    def close(self) -> None:
        if not self._lock.acquire(blocking=False):
            return super().close()  # it is at work, and nobody is to get what it says
        try:
            if self._compiler is not None and not self._compiler.is_gone:
                with _idle_lock:
                    _idle_compilers.append((self._checkpoint.build_tokenizer, self._compiler))
                    del _idle_compilers[:-NUM_IDLE]
            self._compiler = None
        finally:
            self._lock.release()

    def _started(self) -> Any:
        with _idle_lock:
            for kept in _idle_compilers:
                build, compiler = kept
                if build == self._checkpoint.build_tokenizer and not compiler.is_gone:
                    _idle_compilers.remove(kept)
                    return compiler
        return _starter.submit(super()._started).result(START_S)


_starter = ThreadPoolExecutor(1, "starter")
"""A process that dies with its parent dies with the thread that started it: this one is there to the end."""
NUM_IDLE = 3
"""Each is a process of 70 MB, which ends when it is forgotten."""
_idle_lock = Lock()
_idle_compilers: list[tuple[Callable[[], Tokenizer], Any]] = []


@lru_cache(maxsize=8)
def _read_prompting(checkpoint: Checkpoint, parser: ParserName) -> Prompting:
    return Prompting(_with_shared_tokenizer(checkpoint), parser)


@lru_cache(maxsize=8)
def _with_shared_tokenizer(checkpoint: Checkpoint) -> Checkpoint:
    return replace(checkpoint, build_tokenizer=partial(_shared_tokenizer, checkpoint.build_tokenizer))


@cache
def _shared_tokenizer(build: Callable[[], Tokenizer]) -> Tokenizer:
    """Return the one tokenizer of all gateways of a model, which do not change it.

    Building it takes as long as the rest of their start.
    """
    return build()
