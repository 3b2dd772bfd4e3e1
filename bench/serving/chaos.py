"""The test of services that die, freeze and come back under load.

    python -m bench.serving.chaos --minutes 10
    python -m bench.serving.chaos --minutes 3 --transfer tcp --seed 2
    python -m bench.serving.chaos --device cuda --transfer nvlink --model /dev/shm/tiny --kv-cache-mib 2

It checks that every answer is right or an error that says why, and that nothing is held when all is quiet again. Two
prefill and two decode workers, a coordinator and a gateway are started one by one; workers share the GPUs in turn. In
each round one to three faults are made while clients send requests. Then services that died are started again, the
clients pause, and within a minute every request must have ended, every page and credit must be free, and the next
request must be answered. Answers are greedy, in float32, and compared with those of the system before its first fault.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import aiohttp
import torch

from bench.load.client import StreamResult, ask, body_of, random_prompt, session
from bench.report.result import ResultRow, write_result
from bench.system.local_system import get_json, is_ready, model_of
from bench.system.resource_usage import gpu_names
from bench.system.services import Services
from coordinator.store.redis_store import RedisStore

ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
REST_TIMEOUT_S = 60.0
FREEZES_S = (0.3, 2.0, 5.0, 12.0)
"""Below and above the 3 s after which a silent peer is lost, and the 10 s of a lease."""
REDIS_FREEZES_S = (0.5, 2.0, 6.0)
PROMPTS = (1, 3, 17, 64, 100, 333, 700)
ANSWERS = (1, 2, 5, 30, 60, 300)
"""Tokens of the answers; the longest is still being decoded when most faults are made."""
WORDS = ("HTTP", "error in the stream", "connection lost", "no connection")
"""Reasons that a client can act on. Only a gateway that is killed may lose connections."""


def main() -> int:
    args = parse()
    with tempfile.TemporaryDirectory(prefix="tandem-chaos-") as folder:
        settings = {
            "TANDEM_NUM_THREADS": "1",
            "TANDEM_KV_CACHE_MIB": str(args.kv_cache_mib),
            "TANDEM_MODEL": args.model,
        }
        with Services(Path(folder), workers(args.transfer, args.device), **settings) as services:
            toll = asyncio.run(run(services, args))
    rows = toll.rows()
    for row in rows:
        print(f"{row.name:32s} {row.value:>8} {row.unit:10s} {dict(row.params)}")
    names = ("minutes", "transfer", "seed", "device", "model", "kv_cache_mib", "clients")
    write_result(args.out, "chaos", rows, {name: getattr(args, name) for name in names} | {"gpus": gpu_names()})
    return 1 if toll.faults else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--model", default="", help="default: the small one that comes with Tandem")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kv-cache-mib", type=int, default=64, help="small, so that requests wait for room")
    parser.add_argument("--clients", type=int, default=8, help="how many ask at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="result file")
    return parser.parse_args()


def workers(transfer: str, device: str) -> dict[str, tuple[str, ...]]:
    places = [device] if device == "cpu" else [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if not places:
        raise SystemExit("--device cuda: torch sees no GPU here")
    return {
        name: ("--role", role, "--transfer", transfer, "--dtype", "float32", "--device", place)
        for (name, role), place in zip(ROLES.items(), cycle(places), strict=False)
    }


@dataclass
class FaultReport:
    """What was done to the system, what became of the requests, and the `faults`, which must never happen."""

    done: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    num_asking: int = 0
    num_rests: int = 0
    longest_s: float = 0.0

    def fault(self, kind: str, words: object) -> None:
        self.faults[kind] += 1
        print(f"{kind}: {words}", file=sys.stderr)

    def count(self, answer: StreamResult, wanted: str, has_left: bool) -> None:
        """Count an answer by how it ended.

        `wanted` is the right text: an answer must be a beginning of it, however it ended.
        """
        self.longest_s = max(self.longest_s, answer.total_s)
        self.answers[answer.reason or ("left" if has_left else "right")] += 1
        is_whole = not answer.reason and not has_left
        if not (answer.text == wanted if is_whole else wanted.startswith(answer.text.rstrip("\ufffd"))):
            self.fault("wrong answer", f"{answer.text!r}, not {wanted!r}")
        if answer.reason and not answer.reason.startswith(WORDS):
            self.fault("an end without words", answer.error)

    def rows(self) -> list[ResultRow]:
        rows = [ResultRow(f"fault made: {name}", count, "times") for name, count in sorted(self.done.items())]
        rows += [ResultRow(f"answers: {name}", count, "requests") for name, count in sorted(self.answers.items())]
        rows += [
            ResultRow("longest request", round(self.longest_s, 1), "s"),
            ResultRow("rests", self.num_rests, "times"),
        ]
        kinds = ("wrong answer", "an end without words", "not clean at rest", "no answer after rest")
        return rows + [ResultRow(kind, self.faults[kind], "times") for kind in kinds]


@dataclass(frozen=True)
class ChaosPrompt:
    prompt: list[int]
    max_tokens: int
    answer: str

    def body(self, model: str) -> bytes:
        return body_of(model, self.prompt, self.max_tokens)


async def run(services: Services, args: argparse.Namespace) -> FaultReport:
    toll, rng = FaultReport(), random.Random(args.seed)
    for name in services.names:
        services.start(name)
    for name in services.names:
        await services.ready(name)
    async with session() as http:
        questions = await calm(http, services, rng)
        may_ask = asyncio.Event()
        clients = [
            asyncio.create_task(client(http, services, questions, random.Random(f"{args.seed} {i}"), may_ask, toll))
            for i in range(args.clients)
        ]
        until = time.monotonic() + args.minutes * 60.0
        while time.monotonic() < until and not any(task.done() for task in clients):
            may_ask.set()
            await strike(services, rng, toll)
            await asyncio.sleep(rng.uniform(1.0, 4.0))
            may_ask.clear()
            await rest(http, services, questions[0], toll)
        for task in clients:
            task.cancel()
        ends = await asyncio.gather(*clients, return_exceptions=True)
        for end in ends:
            if not isinstance(end, asyncio.CancelledError):
                raise RuntimeError("a client ended") from (end if isinstance(end, BaseException) else None)
    return toll


async def calm(http: aiohttp.ClientSession, services: Services, rng: random.Random) -> list[ChaosPrompt]:
    """Return prompts with their answers; each is asked twice, and the second time its prefix is cached."""
    async with asyncio.timeout(REST_TIMEOUT_S):
        while not is_ready(services.url):
            await asyncio.sleep(0.1)
    model, questions = model_of(services.url), []
    for num_tokens in PROMPTS * 3:
        prompt, max_tokens = random_prompt(num_tokens, rng, vocabulary=256), rng.choice(ANSWERS)
        body = body_of(model, prompt, max_tokens)
        first, second = [await ask(http, services.url, body, max_tokens) for _ in range(2)]
        if first.reason or second.reason or first.text != second.text:
            raise RuntimeError(f"without any fault: {first.error or first.text!r}, {second.error or second.text!r}")
        questions.append(ChaosPrompt(prompt, max_tokens, first.text))
    return questions


async def client(
    http: aiohttp.ClientSession,
    services: Services,
    questions: list[ChaosPrompt],
    rng: random.Random,
    may_ask: asyncio.Event,
    toll: FaultReport,
) -> None:
    """Send one request after another; hang up in the middle of one of six."""
    model = model_of(services.url)
    while True:
        await may_ask.wait()
        question = rng.choice(questions)
        leave_after = rng.randrange(1, 5) if rng.random() < 1 / 6 else None
        toll.num_asking += 1
        answer = await ask(http, services.url, question.body(model), question.max_tokens, leave_after)
        toll.num_asking -= 1
        has_left = leave_after is not None and answer.num_tokens >= leave_after
        toll.count(answer, question.answer, has_left)
        await asyncio.sleep(0.2 if answer.reason else rng.random() * 0.05)


async def rest(http: aiohttp.ClientSession, services: Services, question: ChaosPrompt, toll: FaultReport) -> None:
    """Check that nothing is left of the requests so far, and that the next one is answered."""
    toll.num_rests += 1
    await revive(services)
    until = time.monotonic() + REST_TIMEOUT_S
    while left := await leftovers(services, toll):
        await revive(services)  # a worker that drained may have ended only now
        if time.monotonic() > until:
            toll.fault("not clean at rest", left)
            break
        await asyncio.sleep(0.5)
    model, until = model_of(services.url), time.monotonic() + REST_TIMEOUT_S
    while (answer := await ask(http, services.url, question.body(model), question.max_tokens)).reason:
        if time.monotonic() > until:
            toll.fault("no answer after rest", answer.error)
            break
        await asyncio.sleep(0.2)


async def leftovers(services: Services, toll: FaultReport) -> list[str]:
    """Return requests that have not ended, what workers still hold, and credits that were not returned."""
    left = [f"{toll.num_asking} requests have not ended"] if toll.num_asking else []
    for name in services.workers:
        left += await asyncio.to_thread(what_it_holds, services, name)
    store = RedisStore(services.redis.url, "default")
    try:
        for worker in await store.workers():
            credits = worker.pending_tokens, worker.num_prefills, worker.reserved_tokens, worker.num_decodes
            left += [f"{worker.node.info.worker_id}'s credits {credits}"] if any(credits) else []
        left += [f"{count} requests {state}" for state, count in (await store.counts()).states.items()]
    finally:
        await store.close()
    return left


def what_it_holds(services: Services, name: str) -> list[str]:
    try:
        core = get_json(f"{services.facts(name)['url']}/health")["core"]
    except OSError as error:  # the worker is ending, or reports that it is unhealthy
        return [f"{name}: {error}"]
    return [] if core["is_clean"] else [f"{name} holds {core['gauges']}"]


async def revive(services: Services) -> None:
    for name in services.names:
        if not services.is_alive(name):
            services.start(name)
            await services.ready(name)


# faults


async def strike(services: Services, rng: random.Random, toll: FaultReport) -> None:
    """Make one to three faults, one after another, then start again the services that they ended."""
    for _ in range(rng.randrange(1, 4)):
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        name = rng.choice(list(FAULTS))
        toll.done[name] += 1
        await FAULTS[name](services, rng)
    await asyncio.sleep(rng.uniform(0.0, 2.0))
    await revive(services)


def a_worker(services: Services, rng: random.Random) -> str:
    return rng.choice([name for name in services.workers if services.is_alive(name)] or list(services.workers))


async def freeze(services: Services, name: str, seconds: float, to_core: bool = False) -> None:
    services.signal(name, signal.SIGSTOP, to_core)
    await asyncio.sleep(seconds)
    services.signal(name, signal.SIGCONT, to_core)


async def kill_front(services: Services, rng: random.Random) -> None:
    services.signal(a_worker(services, rng), signal.SIGKILL)


async def kill_core(services: Services, rng: random.Random) -> None:
    services.signal(a_worker(services, rng), signal.SIGKILL, to_core=True)


async def freeze_front(services: Services, rng: random.Random) -> None:
    await freeze(services, a_worker(services, rng), rng.choice(FREEZES_S))


async def freeze_core(services: Services, rng: random.Random) -> None:
    await freeze(services, a_worker(services, rng), rng.choice(FREEZES_S), to_core=True)


async def drain_worker(services: Services, rng: random.Random) -> None:
    services.signal(a_worker(services, rng), signal.SIGTERM)


async def restart_gateway(services: Services, rng: random.Random) -> None:
    await restart(services, "gateway", signal.SIGTERM)


async def kill_gateway(services: Services, rng: random.Random) -> None:
    await restart(services, "gateway", signal.SIGKILL)


async def freeze_gateway(services: Services, rng: random.Random) -> None:
    await freeze(services, "gateway", rng.choice(FREEZES_S))


async def kill_coordinator(services: Services, rng: random.Random) -> None:
    await restart(services, "coordinator", signal.SIGKILL)


async def restart(services: Services, name: str, number: signal.Signals) -> None:
    services.signal(name, number)
    await services.ended(name)
    services.start(name)
    await services.ready(name)


async def freeze_redis(services: Services, rng: random.Random) -> None:
    pid = services.redis.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(rng.choice(REDIS_FREEZES_S))
    os.kill(pid, signal.SIGCONT)


async def empty_redis(services: Services, rng: random.Random) -> None:
    await asyncio.to_thread(services.redis.stop)
    services.redis.start()


FAULTS: dict[str, Callable[[Services, random.Random], Awaitable[None]]] = {
    "worker killed": kill_front,
    "engine core killed": kill_core,
    "worker frozen": freeze_front,
    "engine core frozen": freeze_core,
    "worker drained": drain_worker,
    "gateway restarted": restart_gateway,
    "gateway killed": kill_gateway,
    "gateway frozen": freeze_gateway,
    "coordinator killed": kill_coordinator,
    "Redis frozen": freeze_redis,
    "Redis restarted empty": empty_redis,
}


if __name__ == "__main__":
    sys.exit(main())
