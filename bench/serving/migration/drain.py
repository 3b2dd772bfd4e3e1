"""A worker of many answers that drains, beside the ways without migration, in the same system.

All answers run on one of two decode workers: the other one is restarted as they are asked, and is back by the time they
are to go there. Answers are compared with those of a run in which nothing was disturbed.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import psutil

from bench.load.client import random_prompt, session
from bench.report.result import ResultRow
from bench.serving.migration.movable_requests import MovableRequest, StreamedReply, stream_once
from bench.system.local_system import System, get_json, running
from process.local_http import open_local

PROMPT_TOKENS = 64
DEADLINE_S = 300.0
SETTINGS = {"TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "1024", "TANDEM_MAX_NUM_SEQS": "80"}
KILLED, WAITED = "replay: its core is killed", "it waits: no migration"


@dataclass(frozen=True)
class DrainRun:
    """One run: its answers, and when they were asked for (monotonic seconds).

    `empty_s`: how long its worker had them after the disturbance; `leave_s`: how long its process was there.
    """

    answers: list[StreamedReply]
    began_s: float
    empty_s: float = 0.0
    leave_s: float = 0.0
    num_replays: float = 0.0

    @property
    def longest_gaps_s(self) -> list[float]:
        return sorted(max(answer.choices[0].gaps_s, default=0.0) for answer in self.answers)

    @property
    def mean_time_s(self) -> float:
        """Return how long an answer took that did not fail before its first token."""
        ends_s = [answer.choices[0].times_s[-1] for answer in self.answers if answer.choices[0].times_s]
        return sum(end_s - self.began_s for end_s in ends_s) / max(1, len(ends_s))

    def differences(self, undisturbed: "DrainRun") -> list[str]:
        """Return in words each answer that failed, or is another than without a disturbance."""
        pairs = zip(self.answers, undisturbed.answers, strict=True)
        found = ((answer.request, answer.difference(other)) for answer, other in pairs)
        return [f"{request.name}, {request.kind}: {words}" for request, words in found if words]


@dataclass(frozen=True)
class DrainRuns:
    """The runs of all ways with the same requests."""

    undisturbed: DrainRun
    moved: DrainRun
    killed: DrainRun
    waited: DrainRun

    @property
    def is_passed(self) -> bool:
        return not self.moved.differences(self.undisturbed) and not self.moved.num_replays

    def rows(self) -> list[ResultRow]:
        """Return the figures; those that took another way are the peers."""
        num_answers = len(self.moved.answers)
        load = {"answers": num_answers}
        found = [
            ResultRow(
                "drain: until the worker has no answer",
                self.moved.empty_s,
                "s",
                load,
                None,
                WAITED,
                self.waited.empty_s,
            ),
            ResultRow(
                "drain: until its process is gone", self.moved.leave_s, "s", load, None, WAITED, self.waited.leave_s
            ),
            ResultRow(
                "drain: answers replayed", self.moved.num_replays, "", load, None, KILLED, self.killed.num_replays
            ),
        ]
        for name, share in (("p50", 0.5), ("p99", 0.99), ("most", 1.0)):
            calm, moved, killed = (
                run.longest_gaps_s[min(num_answers - 1, int(share * num_answers))]
                for run in (self.undisturbed, self.moved, self.killed)
            )
            found.append(ResultRow(f"longest gap of an answer without a disturbance, {name}", calm, "s", load))
            found.append(ResultRow(f"longest gap of an answer, {name}", moved, "s", load, None, KILLED, killed))
        wrong = [len(run.differences(self.undisturbed)) for run in (self.moved, self.killed)]
        found.append(ResultRow("drain: answers that failed or are others", wrong[0], "", load, None, KILLED, wrong[1]))
        return found


def measure_drains(num_answers: int, num_tokens: int) -> DrainRuns:
    """Return the runs of one system, and of one like it that moves nothing."""
    flags = ("--dtype", "float32", "--decode", "2")
    with running(*flags, **SETTINGS) as system:
        undisturbed, moved, killed = asyncio.run(_ways_that_go_on(system, num_answers, num_tokens))
    with running(*flags, **SETTINGS, TANDEM_MIGRATE_FOR="") as system:
        requests = requests_of(system, num_answers, num_tokens)
        waited = asyncio.run(run_on_one(system, requests, lambda w: os.kill(w["pid"], signal.SIGTERM)))
    return DrainRuns(undisturbed, moved, killed, waited)


async def _ways_that_go_on(system: System, num_answers: int, num_tokens: int) -> tuple[DrainRun, DrainRun, DrainRun]:
    requests = requests_of(system, num_answers, num_tokens)
    undisturbed = await run_on_one(system, requests, None)
    moved = await run_on_one(system, requests, lambda worker: os.kill(worker["pid"], signal.SIGTERM))
    killed = await run_on_one(system, requests, lambda worker: os.kill(worker["core_pid"], signal.SIGKILL))
    return undisturbed, moved, killed


def requests_of(system: System, num_answers: int, num_tokens: int) -> list[MovableRequest]:
    """Return requests of which every other one is greedy, and the rest are drawn by seeds.

    Log-probabilities come with each token: they tell rounding from a fault where an answer differs.
    """
    rng, model, requests = random.Random(1), system.model(), []
    for number in range(num_answers):
        kind, sampling = (
            ("greedy", {"temperature": 0.0}) if number % 2 else ("seed", {"temperature": 0.8, "seed": number})
        )
        asked = {"model": model, "prompt": random_prompt(PROMPT_TOKENS, rng), "max_tokens": num_tokens}
        told = {"ignore_eos": True, "stream": True, "return_token_ids": True, "logprobs": 1}
        requests.append(MovableRequest(f"r{number}", kind, asked | told | sampling))
    return requests


async def run_on_one(
    system: System, requests: list[MovableRequest], disturb: Callable[[dict], None] | None
) -> DrainRun:
    """Ask all at once on one worker; once all answer and the other worker is there, disturb that one."""
    first, second = [worker for worker in system.workers() if worker["role"] == "decode"]
    replays = _metric(system, "tandem_gateway_replays_total")
    os.kill(second["pid"], signal.SIGTERM)
    await _until(lambda: not psutil.pid_exists(second["pid"]))
    async with session() as http:
        began_s = time.monotonic()
        asked = asyncio.create_task(_ask_all(http, system, requests))
        await _until(lambda: _num_running(first) == len(requests) or asked.done())
        await _until(system.is_up)
        begin_s = empty_s = leave_s = time.perf_counter()
        if disturb is not None:
            disturb(first)
            await _until(lambda: not _num_running(first))
            empty_s = time.perf_counter()
            await _until(lambda: not psutil.pid_exists(first["pid"]))
            leave_s = time.perf_counter()
        answers = await asked
    await _until(system.is_up)
    num_replays = _metric(system, "tandem_gateway_replays_total") - replays
    print(f"{len(answers)} answers, {num_replays:g} replayed, left after {leave_s - begin_s:.2f} s", file=sys.stderr)
    return DrainRun(answers, began_s, empty_s - begin_s, leave_s - begin_s, num_replays)


async def _ask_all(http: aiohttp.ClientSession, system: System, requests: list[MovableRequest]) -> list[StreamedReply]:
    return await asyncio.gather(*(stream_once(http, system.url, request) for request in requests))


def _num_running(worker: dict) -> int:
    """Return how many answers it decodes; none once it is gone."""
    try:
        return int(get_json(f"{worker['url']}/health")["core"]["gauges"]["requests"])
    except (OSError, TypeError, KeyError):
        return 0


async def _until(is_so: Callable[[], bool]) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(DEADLINE_S):
        while not await asyncio.to_thread(is_so):
            await asyncio.sleep(0.02)


def _metric(system: System, name: str) -> float:
    with open_local(f"{system.url}/metrics", timeout_s=10) as response:
        lines = [line for line in response.read().decode().splitlines() if line.startswith(f"{name} ")]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0
