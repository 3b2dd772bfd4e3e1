"""A worker's HTTP protocol without a model: answers with the prompt's own tokens, at a set pace."""

import asyncio
import hmac
import itertools
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from contracts.codec import decoder, frame
from contracts.events import (
    HEARTBEAT_S,
    Event,
    EventFrame,
    Failed,
    Finished,
    FinishReason,
    Prefilled,
    PromptScored,
    PromptToken,
    Token,
    Tokens,
)
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.layout import KVLayout
from contracts.node import Node, NodeInfo, NodeLoad, TransferCapabilities, WorkerRole
from contracts.request import AdapterRef, Cancel, Job

EMBEDDING = (3.0, 0.0, -4.0)
"""What every text has for an embedding, if one is asked for."""


@dataclass
class FakeWorker:
    """A worker that answers by a script.

    `period_s`: time between two steps, each of which gives every answer a token; 0.0: as fast as they are read.

    `refuse`: HTTP status for jobs, 0 for none. `script`: the token ids of every answer; empty: those of the prompt,
    over and over. `adapters`: None for a worker that can load none; `refused_adapter`: the name of one that it does not
    load.
    """

    worker_id: WorkerId
    role: WorkerRole
    secret: str
    period_s: float = 0.0
    refuse: int = 0
    incarnation: Incarnation = "1"  # type: ignore[assignment]
    model: str = "fake"
    layout: KVLayout | None = None
    ways: TransferCapabilities | None = None
    max_model_len: int = 2048
    cached_tokens: int = 0
    synthetic_acceptance: float = 0.0
    drafts: tuple[int, int] = (0, 0)
    script: Sequence[int] = ()
    adapters: tuple[AdapterRef, ...] | None = None
    refused_adapter: str = ""
    load: NodeLoad = field(default_factory=NodeLoad)
    jobs: list[Job] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._written = asyncio.Event()
        self._queues: dict[GatewayId, asyncio.Queue[list[Event] | None]] = {}
        self._running: dict[tuple[RequestId, Epoch], asyncio.Task[None]] = {}
        self._decoder = decoder(list[Job | Cancel])
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=32 << 20)
        routes = [
            web.post("/jobs", self._jobs),
            web.post("/adapters", self._adapters),
            web.get("/events", self._events),
        ]
        app.add_routes(routes)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stop, as if the process ended."""
        for task in list(self._running.values()):
            task.cancel()
        self.break_streams()
        if self._runner is not None:
            await self._runner.cleanup()

    def break_streams(self) -> None:
        self._written.set()
        for queue in self._queues.values():
            queue.put_nowait(None)

    def publish(self, gateway_id: GatewayId, events: list[Event]) -> None:
        if (queue := self._queues.get(gateway_id)) is not None:
            queue.put_nowait(events)

    def fail(self, job: Job) -> None:
        """Fail this job, as if its engine gave it up."""
        self._cancel(Cancel(job.request_id, job.epoch, "failed"))
        self.publish(job.gateway_id, [Failed(job.request_id, job.epoch, "internal", "told to")])

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def node(self) -> Node:
        layout_id = self.layout.layout_id if self.layout else "fake"
        info = NodeInfo(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            url=self.url,
            transfer="127.0.0.1:1",
            model=self.model,
            layout_id=layout_id,
            max_model_len=self.max_model_len,
            capacity_tokens=1 << 20,
            version="0",
            pid=0,
            core_pid=0,
            ways=self.ways or TransferCapabilities(memory="host", sends=["tcp"], takes={layout_id: ["tcp"]}),
            layout=self.layout,
            synthetic_acceptance=self.synthetic_acceptance,
            adapters=self.adapters,
        )
        return Node(info=info, load=self.load, alive=True)

    async def _jobs(self, request: web.Request) -> web.Response:
        if not self._knows(request):
            return web.json_response({"error": {"code": "auth_failed", "message": "wrong secret"}}, status=401)
        messages = self._decoder.decode(await request.read())
        if self.refuse and any(isinstance(message, Job) for message in messages):
            return web.json_response({"error": {"code": "refused", "message": "told to"}}, status=self.refuse)
        for message in messages:
            self._cancel(message) if isinstance(message, Cancel) else self._start(message)
        return web.Response(status=202)

    async def _adapters(self, request: web.Request) -> web.Response:
        """Take what /adapters of a worker takes; an adapter's digest is its path."""
        asked = await request.json()
        if self.adapters is None or asked["name"] == self.refused_adapter:
            words = f"the adapter '{asked['name']}' is not served"
            return web.json_response({"error": {"code": "invalid_request", "message": words}}, status=400)
        known = [ref for ref in self.adapters if ref.name != asked["name"]]
        if "path" in asked:
            known.append(AdapterRef(asked["name"], asked["path"].encode()))
        self.adapters = tuple(known)
        return web.json_response({"adapters": [ref.name for ref in known]})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if not self._knows(request):
            return web.json_response({"error": {"code": "auth_failed", "message": "wrong secret"}}, status=401)
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            async for data in self._frames(GatewayId(request.query["gateway_id"])):
                await response.write(data)
        return response

    async def _frames(self, gateway_id: GatewayId) -> AsyncIterator[bytes]:
        queue = self._queues[gateway_id] = asyncio.Queue()
        queue.put_nowait([])
        for sequence in itertools.count():
            steps = await _arrived(queue)
            if None in steps:
                return
            events = [event for step in steps for event in step or []]
            yield frame(EventFrame(self.worker_id, self.incarnation, sequence, events))
            self._written.set()
            self._written = asyncio.Event()

    def _knows(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self.secret}".encode())

    def _start(self, job: Job) -> None:
        self.jobs.append(job)
        if job.adapter is not None and job.adapter not in (self.adapters or ()):
            self.publish(job.gateway_id, [Failed(job.request_id, job.epoch, "adapter_missing", "it is not loaded")])
            return
        task = self._running[job.request_id, job.epoch] = asyncio.create_task(self._answer(job))
        task.add_done_callback(lambda _: self._running.pop((job.request_id, job.epoch), None))

    def _cancel(self, cancel: Cancel) -> None:
        self.cancels.append(cancel)
        if (task := self._running.get((cancel.request_id, cancel.epoch))) is not None:
            task.cancel()

    async def _answer(self, job: Job) -> None:
        """Prefill sends the first token, decode the others; a worker that is both sends all."""
        route, first, total = job.route, job.num_answered, self._num_tokens(job)
        if route.prefill.worker_id == self.worker_id:
            stages = {"queue": 0.0, "prefill": 0.0}
            prefilled = Prefilled(job.request_id, job.epoch, self.cached_tokens, stages)
            self.publish(job.gateway_id, [*self._scored(job), prefilled, self._token(job, first)])
            if total == first + 1:
                self.publish(job.gateway_id, [self._end(job)])
        if route.decode.worker_id == self.worker_id:
            stages = {} if route.is_local else dict.fromkeys(("expect", "land", "queue"), 0.0)
            for index in range(first + 1, total):
                await self._next_step()
                last = [self._end(job)] if index == total - 1 else []
                told = stages if index == first + 1 else {}
                num_drafted, num_accepted = self.drafts
                tokens = msgspec.structs.replace(
                    self._token(job, index), stages_s=told, num_drafted=num_drafted, num_accepted=num_accepted
                )
                self.publish(job.gateway_id, [tokens, *last])

    async def _next_step(self) -> None:
        """All answers step together. Without a period, when the former step's frame has been written."""
        if self.period_s:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep((round(now / self.period_s) + 1) * self.period_s - now)
        elif any(queue.qsize() for queue in self._queues.values()):
            await self._written.wait()
        else:
            await asyncio.sleep(0)

    def _scored(self, job: Job) -> list[Event]:
        if (count := job.sampling.prompt_logprobs) is None or len(job.token_ids) == 1:
            return []
        tokens = [PromptToken(token_id, -0.25, 1, [(token_id, -0.25)] * count) for token_id in job.token_ids[1:]]
        return [PromptScored(job.request_id, job.epoch, 1, tokens)]

    def _token(self, job: Job, index: int) -> Tokens:
        token_ids = self.script or job.token_ids[: len(job.token_ids) - job.num_answered]
        token_id = token_ids[index % len(token_ids)]
        count = job.sampling.logprobs
        top = [(token_id, -0.5)] * count if count is not None else None
        row = array("f", EMBEDDING).tobytes() if job.sampling.returns_embedding and index == 0 else None
        token = Token(index, token_id, None if count is None else -0.5, top, row)
        return Tokens(job.request_id, job.epoch, [token])

    def _end(self, job: Job) -> Finished:
        total = self._num_tokens(job)
        reason = FinishReason.LENGTH if total == job.sampling.max_tokens else FinishReason.STOP
        return Finished(job.request_id, job.epoch, total, reason, {"decode": 0.0})

    def _num_tokens(self, job: Job) -> int:
        return min(len(self.script) or job.sampling.max_tokens, job.sampling.max_tokens)


async def _arrived(queue: asyncio.Queue[list[Event] | None]) -> list[list[Event] | None]:
    """All that waits, at least one; a heartbeat after a silence. One frame carries a step of all answers."""
    try:
        async with asyncio.timeout(HEARTBEAT_S):
            steps = [await queue.get()]
    except TimeoutError:
        return [[]]
    while not queue.empty():
        steps.append(queue.get_nowait())
    return steps
