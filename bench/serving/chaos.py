"""The test of services that die, freeze and come back under load.

    python -m bench.serving.chaos --minutes 10
    python -m bench.serving.chaos --minutes 3 --transfer tcp --seed 2
    python -m bench.serving.chaos --minutes 10 --tiers
    python -m bench.serving.chaos --device cuda --transfer nvlink --model /dev/shm/tiny --kv-cache-mib 2

It checks that every answer is right or an error that says why, and that nothing is held when all is quiet again. Two
prefill and two decode workers, a coordinator and a gateway are started one by one; workers share the GPUs in turn. In
each round one to three faults are made while clients send requests. Then services that died are started again, the
clients pause, and within a minute every request must have ended, every page and credit must be free, and the next
request must be answered. Where this machine lets us, each worker is a host of a network, which is cut and slow, and
changes what it carries. With --tiers workers keep KV in memory, on disk and in a store, which are damaged, full, slow
and gone as well. Answers are greedy, in float32, and compared with those of the system before its first fault.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path

import aiohttp
import torch

from bench.load.client import StreamResult, ask, body_of, random_prompt, session
from bench.report.result import ResultRow, write_result
from bench.serving.kept_kv import STORE_HOST, KeptKV, kv_places, optional_network
from bench.serving.kv_faults import DAMAGED
from bench.serving.kv_outages import OUTAGES
from bench.serving.network_faults import NETWORK_FAULTS
from bench.serving.service_faults import SERVICE_FAULTS, revive
from bench.system.leftovers import still_held
from bench.system.local_system import model_of
from bench.system.resource_usage import gpu_names
from bench.system.services import Services

ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
REST_TIMEOUT_S = 60.0
PROMPTS = (1, 3, 17, 64, 100, 333, 700)
ANSWERS = (1, 2, 5, 30, 60, 300)
"""Tokens of the answers; the longest is still being decoded when most faults are made."""
WORDS = ("HTTP", "error in the stream", "connection lost", "no connection")
"""Reasons that a client can act on. Only a gateway that is killed may lose connections."""


Faults = dict[str, Callable[[random.Random], Awaitable[object]]]


def main() -> int:
    args = parse()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-chaos-")))
        settings = {
            "TANDEM_NUM_THREADS": "1",
            "TANDEM_KV_CACHE_MIB": str(args.kv_cache_mib),
            "TANDEM_MODEL": args.model,
        }
        network = stack.enter_context(optional_network([*ROLES, STORE_HOST]))
        places = stack.enter_context(kv_places(folder, network)) if args.tiers else None
        if places is not None:
            settings |= places.settings()
        services = stack.enter_context(Services(folder, workers(args.transfer, args.device), network, **settings))
        kinds = SERVICE_FAULTS | (NETWORK_FAULTS if network else {})
        faults: Faults = {name: partial(fault, services) for name, fault in kinds.items()}
        if places is not None:
            kept = KeptKV(services, places)
            faults |= {name: partial(fault, kept) for name, fault in (DAMAGED | OUTAGES).items()}
        toll = asyncio.run(run(services, faults, args))
    rows = toll.rows()
    for row in rows:
        print(f"{row.name:32s} {row.value:>8} {row.unit:10s} {dict(row.params)}")
    names = ("minutes", "transfer", "seed", "device", "model", "kv_cache_mib", "clients", "tiers")
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
    parser.add_argument("--tiers", action="store_true", help="keep KV in memory, on disk and in a store, with faults")
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


async def run(services: Services, faults: Faults, args: argparse.Namespace) -> FaultReport:
    toll, rng = FaultReport(), random.Random(args.seed)
    await services.start_all(REST_TIMEOUT_S)
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
            await strike(services, faults, rng, toll)
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
    asking = [f"{toll.num_asking} requests have not ended"] if toll.num_asking else []
    return asking + await still_held(services)


async def strike(services: Services, faults: Faults, rng: random.Random, toll: FaultReport) -> None:
    """Make one to three faults, one after another, then start again the services that they ended."""
    for _ in range(rng.randrange(1, 4)):
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        name = rng.choice(list(faults))
        if await faults[name](rng) is not False:  # there was something to damage
            toll.done[name] += 1
    await asyncio.sleep(rng.uniform(0.0, 2.0))
    await revive(services)


if __name__ == "__main__":
    sys.exit(main())
