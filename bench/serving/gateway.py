"""The benchmark of the gateway's CPU time per token and of the time it adds to the first token.

The workers are stand-ins.

    python -m bench.serving.gateway
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import psutil
import uvloop

from bench.report.result import ResultRow, write_result
from checkpoint import open_checkpoint
from contracts.codec import FrameReader, decoder, encode
from contracts.events import EventFrame, Tokens
from contracts.ids import Epoch, GatewayId, RequestId, WorkerId
from contracts.node import NodeInfo, WorkerRole
from contracts.request import Job, Route
from contracts.sampling import SamplingParams
from gateway.main import run
from gateway.settings import GatewaySettings
from testing.fake_worker import FakeWorker
from testing.memory_store import MemoryStore

STREAMS = (1, 64, 512)
TOKENS_PER_S = 20
PACED_TOKENS = 160
UNPACED_TOKENS = 200
MEASURED_TOKENS = 60_000
NUM_FIRSTS = 400
CPU_TICK_S = 0.01
"""The resolution in which the kernel counts CPU time."""
SECRET = "bench"
PROMPT = "the quick brown fox"
DIRECT = GatewayId("direct")

log = logging.getLogger("bench")


def main() -> int:
    """Run the benchmark and return the exit code.

    The stand-in workers and the clients share this process; the gateway has its own.
    """
    options = _arguments()
    logging.basicConfig(level=logging.WARNING)
    rows = uvloop.run(_measure())
    for row in rows:
        log.warning("%s %s: %.4g %s", row.name, dict(row.params), row.value, row.unit)
    config = {"streams": STREAMS, "tokens_per_s": TOKENS_PER_S, "firsts": NUM_FIRSTS, "prompt": PROMPT}
    write_result(options.out, "gateway", rows, config)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="result file")
    return parser.parse_args()


async def _measure() -> list[ResultRow]:
    roles = {"p0": WorkerRole.PREFILL, "d0": WorkerRole.DECODE}
    workers = [FakeWorker(WorkerId(name), role, SECRET, model=open_checkpoint("").name) for name, role in roles.items()]
    for worker in workers:
        await worker.start()
    try:
        async with _gateway([worker.node.info for worker in workers]) as (url, process):
            await _load(url, 4, 100)
            rows = await _first_rows(url, workers, process)
            for streams in STREAMS:
                rows += await _paced_rows(url, streams, workers, process)
                rows += await _unpaced_rows(url, streams, process)
            return rows
    finally:
        for worker in workers:
            await worker.stop()


@asynccontextmanager
async def _gateway(infos: list[NodeInfo]) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Run the gateway as it is served, but without Redis, which is not measured here.

    Yields its URL and its process.
    """
    with TemporaryDirectory() as folder:
        ours, theirs = multiprocessing.Pipe()
        args = (infos, Path(folder) / "ready", theirs)
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=args, daemon=True)
        process.start()
        try:
            async with asyncio.timeout(60):
                url = await asyncio.to_thread(ours.recv)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            await asyncio.to_thread(process.join, 10)


def _serve(infos: list[NodeInfo], ready_file: Path, pipe: Connection) -> None:
    asyncio.run(_serve_with(infos, ready_file, pipe))  # the event loop that service.run_service takes


async def _serve_with(infos: list[NodeInfo], ready_file: Path, pipe: Connection) -> None:
    store = MemoryStore(alive_s=inf)
    for info in infos:
        await store.join(info)
    settings = GatewaySettings(secret=SECRET, port=0, ready_file=ready_file)  # type: ignore[arg-type]
    serving = asyncio.create_task(run(settings, store))
    while not ready_file.exists():
        await asyncio.sleep(0.02)
    pipe.send(json.loads(ready_file.read_text())["url"])
    await serving


async def _first_rows(url: str, workers: Sequence[FakeWorker], process: psutil.Process) -> list[ResultRow]:
    """Measure first tokens through the gateway beside those that the same worker sends without it."""
    cpu_s = _cpu_s(process)
    async with aiohttp.ClientSession() as session, _events(session, workers[0]) as arrived:
        pairs = [(await _ttft_s(session, url), await _direct_s(session, workers, arrived)) for _ in range(NUM_FIRSTS)]
    cpu_s = _cpu_s(process) - cpu_s
    through, direct = zip(*pairs[20:], strict=True)
    added = [a - b for a, b in pairs[20:]]
    return [
        ResultRow("gateway CPU for a request of two tokens", cpu_s / NUM_FIRSTS * 1e3, "ms"),
        ResultRow("TTFT added by the gateway, p50", statistics.median(added) * 1e3, "ms"),
        ResultRow("TTFT added by the gateway, p99", _p99(added) * 1e3, "ms"),
        *(
            ResultRow(
                f"TTFT, {name}",
                figure(through) * 1e3,
                "ms",
                {},
                None,
                "the worker called directly",
                figure(direct) * 1e3,
            )
            for name, figure in (("p50", statistics.median), ("p99", _p99))
        ),
    ]


async def _paced_rows(
    url: str, streams: int, workers: Sequence[FakeWorker], process: psutil.Process
) -> list[ResultRow]:
    for worker in workers:
        worker.period_s = 1 / TOKENS_PER_S
    try:
        cpu_s, start_s = _cpu_s(process), time.perf_counter()
        num_tokens = await _load(url, streams, PACED_TOKENS)
        cpu_s, wall_s = max(_cpu_s(process) - cpu_s, CPU_TICK_S), time.perf_counter() - start_s
    finally:
        for worker in workers:
            worker.period_s = 0.0
    params = {"streams": streams, "tokens/s each": TOKENS_PER_S}
    return [
        ResultRow("tokens per second of gateway CPU", num_tokens / cpu_s, "tokens/s", params),
        ResultRow("share of a core", cpu_s / wall_s, "cores", params),
        ResultRow("pace kept", num_tokens / wall_s / streams / TOKENS_PER_S, "of the asked", params),
    ]


async def _unpaced_rows(url: str, streams: int, process: psutil.Process) -> list[ResultRow]:
    cpu_s, start_s = _cpu_s(process), time.perf_counter()
    num_tokens = 0
    while num_tokens < MEASURED_TOKENS:
        num_tokens += await _load(url, streams, UNPACED_TOKENS)
    cpu_s, wall_s = max(_cpu_s(process) - cpu_s, CPU_TICK_S), time.perf_counter() - start_s
    params = {"streams": streams, "tokens/s each": "all that come"}
    return [
        ResultRow("tokens per second of gateway CPU", num_tokens / cpu_s, "tokens/s", params),
        ResultRow("tokens per second, wall", num_tokens / wall_s, "tokens/s", params),
    ]


async def _load(url: str, streams: int, max_tokens: int) -> int:
    """Return how many tokens the streams received."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return sum(await asyncio.gather(*(_stream(session, url, max_tokens) for _ in range(streams))))


async def _stream(session: aiohttp.ClientSession, url: str, max_tokens: int) -> int:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    last = b""
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        async for data in reply.content.iter_any():
            last = (last + data)[-4096:]
    events = [line for line in last.split(b"\n\n") if line.startswith(b"data: {")]
    return json.loads(events[-1][6:])["usage"]["completion_tokens"]


async def _ttft_s(session: aiohttp.ClientSession, url: str) -> float:
    start_s = time.perf_counter()
    body = {"prompt": PROMPT, "max_tokens": 2, "stream": True}
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        await reply.content.readany()
        first_s = time.perf_counter() - start_s
        await reply.content.read()
    return first_s


async def _direct_s(session: aiohttp.ClientSession, workers: Sequence[FakeWorker], arrived: asyncio.Event) -> float:
    """Return the seconds until the first token of the same job, posted to the worker by the client itself."""
    route = Route(RequestId("r"), Epoch(1), workers[0].node.info.ref, workers[1].node.info.ref)
    job = Job(route, DIRECT, [504, 2365, 6354, 16438], SamplingParams(max_tokens=2, seed=1), 60.0)
    arrived.clear()
    start_s = time.perf_counter()
    async with session.post(f"{workers[0].url}/jobs", data=encode([job]), headers=_AUTH):
        await arrived.wait()
    return time.perf_counter() - start_s


@asynccontextmanager
async def _events(session: aiohttp.ClientSession, worker: FakeWorker) -> AsyncIterator[asyncio.Event]:
    """Yield an event that is set by each frame with a token."""
    arrived = asyncio.Event()
    async with session.get(f"{worker.url}/events", params={"gateway_id": DIRECT}, headers=_AUTH) as stream:
        listening = asyncio.create_task(_listen(stream, arrived))
        yield arrived
        listening.cancel()


async def _listen(stream: aiohttp.ClientResponse, arrived: asyncio.Event) -> None:
    reader, frames = FrameReader(), decoder(EventFrame)
    async for data in stream.content.iter_any():
        for payload in reader.feed(data):
            if any(isinstance(event, Tokens) for event in frames.decode(payload).events):
                arrived.set()


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


_AUTH = {"Authorization": f"Bearer {SECRET}"}

if __name__ == "__main__":
    raise SystemExit(main())
