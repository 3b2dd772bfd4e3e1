"""A real worker as a process, and a gateway of a few lines that talks to it. Not a test."""

import asyncio
import atexit
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.system.local_system import get_json
from contracts.codec import FrameReader, decoder, encode
from contracts.events import Event, EventFrame, Failed, Finished
from contracts.ids import Epoch, GatewayId, RequestId, WorkerId
from contracts.request import Cancel, Job, Route, WorkerRef
from contracts.sampling import SamplingParams
from coordinator.store.local_server import RedisServer
from tests.environment import plain_environment
from tests.waiting import async_until, until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0
AUTH = {"authorization": "Bearer s"}
GATEWAY = GatewayId("g")


@dataclass
class RunningWorker:
    """`facts`: what its ready file says. `log`: all that it prints."""

    process: subprocess.Popen
    facts: dict
    log: Path

    @property
    def url(self) -> str:
        return self.facts["url"]

    @property
    def core_pid(self) -> int:
        return self.facts["core_pid"]

    def status_of(self, path: str) -> tuple[int, str]:
        """HTTP status and the word of `/health` or `/ready`."""
        response = httpx.get(f"{self.url}{path}", timeout=DEADLINE_S)
        return response.status_code, response.json()["status"]

    def core(self) -> dict | None:
        """Its latest picture of itself; the first comes a moment after the ready file."""
        return get_json(f"{self.url}/health")["core"]

    def metrics(self) -> dict[str, float]:
        """Sample name -> value, summed over labels."""
        sums: dict[str, float] = {}
        text = httpx.get(f"{self.url}/metrics", timeout=DEADLINE_S).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def wait_clean(self) -> None:
        """Wait for a clean status of the core that is newer than this call: it counts all that was done before."""
        until(self.core)
        before = self.core()
        assert before is not None

        def is_clean() -> bool:
            core = self.core()
            return core is not None and core["num_turns"] > before["num_turns"] and core["is_clean"]

        until(is_clean)


@cache
def _redis() -> RedisServer:
    """Return the server that all workers of this run share; it dies with it."""
    server = RedisServer()
    server.start()
    atexit.register(server.close)
    return server


def registry() -> list[str]:
    """Return the options of a worker that is alone in its pool."""
    return ["--redis-url", _redis().url, "--pool", secrets.token_hex(4)]


@contextmanager
def running_worker(folder: Path, model: str, *flags: str, **environment: str) -> Iterator[RunningWorker]:
    """One worker that serves; killed at the end if it has not ended by then."""
    ready, log = folder / "ready.json", folder / "log"
    own = ("--model", model, "--dtype", "float32", "--ready-file", str(ready))
    command = [sys.executable, "-m", "tandem", "worker", *registry(), *own, *flags]
    settings = {"TANDEM_SECRET": "s", "TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "16"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=plain_environment() | settings | environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        until(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield RunningWorker(process, json.loads(ready.read_text()), log)
    finally:
        process.kill()
        process.wait()


@dataclass
class Gateway:
    """Listens to one worker, and posts to it. `is_open` until the stream ends."""

    http: httpx.AsyncClient
    worker: RunningWorker
    events: list[Event] = field(default_factory=list)
    is_open: bool = False

    async def listen(self) -> None:
        reader, decode = FrameReader(), decoder(EventFrame).decode
        try:
            async with self.http.stream("GET", "/events", params={"gateway_id": GATEWAY}) as response:
                assert response.status_code == 200
                async for data in response.aiter_raw():
                    for payload in reader.feed(data):
                        self.is_open = True
                        self.events += decode(payload).events
        except httpx.TransportError:
            """The worker is gone in the middle of a frame: an end as any other."""
        self.is_open = False

    async def post(self, *messages: Job | Cancel) -> int:
        return (await self.http.post("/jobs", content=encode(list(messages)))).status_code

    def job(self, name: str, num_tokens: int = 20, max_tokens: int = 8, **options) -> Job:
        """One that this worker serves alone, greedy and without an end of its own."""
        facts = self.worker.facts
        ref = WorkerRef(WorkerId(facts["id"]), facts.get("incarnation", "i"), facts["url"], "")
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        route = Route(RequestId(name), Epoch(options.pop("epoch", 1)), ref, ref)
        return Job(route, GATEWAY, list(range(1, num_tokens + 1)), sampling, options.pop("timeout_s", DEADLINE_S))

    def ends(self, name: str) -> list[Event]:
        return [e for e in self.events if isinstance(e, Finished | Failed) and e.request_id == name]

    async def until(self, is_so: Callable[[], object]) -> None:
        await async_until(is_so, DEADLINE_S)


async def connected(worker: RunningWorker, body) -> None:
    """Run `body(gateway)` with the stream open."""
    async with httpx.AsyncClient(base_url=worker.url, headers=AUTH, timeout=DEADLINE_S) as http:
        gateway = Gateway(http, worker)
        listening = asyncio.create_task(gateway.listen())
        await gateway.until(lambda: gateway.is_open)
        try:
            await body(gateway)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


@contextmanager
def starved(pid: int) -> Iterator[None]:
    """All threads of this process get what busy programs on one CPU leave over: less than a thousandth of it."""
    cpu = max(os.sched_getaffinity(0))
    threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(16)]
    before = os.sched_getaffinity(pid)
    try:
        for each in busy:
            os.sched_setaffinity(each.pid, {cpu})
        for thread in threads:
            os.sched_setaffinity(thread, {cpu})
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()
        for thread in threads:
            with suppress(ProcessLookupError, PermissionError):
                os.sched_setaffinity(thread, before)
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
