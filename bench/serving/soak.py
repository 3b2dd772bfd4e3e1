r"""The test of many streams, half of which hang up at random: pages come back and memory stays flat.

    python -m bench.serving.soak --minutes 10 --streams 200
    python -m bench.serving.soak --minutes 30 --streams 256 --device cuda --model /dev/shm/llama-8b \
        --prompt 16384 --answer 1024

Each octave of lengths up to the longest is equally likely. On GPUs the workers are those that `tandem up` starts, and
the cache takes the memory that is free, so the test shows whether enough is left beside it.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from bench.load.client import GREEDY, ask, body_of, random_prompt, session
from bench.report.result import ResultRow, write_result
from bench.system.local_system import System, get_json, running
from bench.system.resource_usage import memory_rows, pids

SAMPLE_S = 10.0
CLEAN_TIMEOUT_S = 60.0
SAMPLINGS: list[Mapping[str, float]] = [
    GREEDY,
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1, "min_p": 0.05, "presence_penalty": 0.5},
]
"""The sampling parameters of streams, each as likely as another."""
POOL = {"TANDEM_KV_CACHE_MIB": "256"}
"""A cache small enough to be used in full within the first minutes, so that later growth is a leak."""


def main() -> int:
    args = parse()
    flags = ["--device", args.device, "--transfer", args.transfer, *(["--model", args.model] if args.model else [])]
    with running(*flags, **(POOL if args.device == "cpu" else {})) as system:
        samples, counts = asyncio.run(soak(system, args))
        clean = wait_clean(system)
        rows = summarize(samples, counts, clean) + memory_rows(system)
        for row in rows:
            print(f"{row.name:24s} {row.value:>12} {row.unit:10s} {dict(row.params)}")
        names = ("streams", "minutes", "transfer", "seed", "device", "model", "prompt", "answer")
        write_result(args.out, "soak", rows, {name: getattr(args, name) for name in names})
    return 0 if all(clean.values()) and not counts["failed"] else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200, help="concurrent streams")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--device", default="cpu", help="cpu: a pair with a small cache")
    parser.add_argument("--model", default="", help="default: the small one that comes with Tandem")
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS", help="the longest prompt")
    parser.add_argument("--answer", type=int, default=48, metavar="TOKENS", help="the longest answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="result file")
    return parser.parse_args()


async def soak(system: System, args: argparse.Namespace) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Keep `args.streams` streams open until the time is up.

    Return memory samples (bytes by process) and the number of each outcome.
    """
    counts = {"finished": 0, "left": 0, "overloaded": 0, "failed": 0}
    until = time.monotonic() + args.minutes * 60.0
    draws = [SoakRequest(random.Random(args.seed + i), args.prompt, args.answer) for i in range(args.streams)]
    sampling = asyncio.create_task(sample_memory(system, until))
    async with session() as http:
        server = http, system.url, system.model()
        await asyncio.gather(*(stream(server, draw, until, counts) for draw in draws))
    return await sampling, counts


@dataclass(frozen=True)
class SoakRequest:
    """The draws of one stream's requests; lengths are in tokens, and at most `prompt` and `answer`."""

    rng: random.Random
    prompt: int
    answer: int

    def prompt_ids(self) -> list[int]:
        return random_prompt(self._length(4, self.prompt), self.rng)

    def max_tokens(self) -> int:
        return self._length(1, self.answer)

    def sampling(self) -> Mapping[str, float]:
        return self.rng.choice(SAMPLINGS)

    def leave_after(self, max_tokens: int) -> int | None:
        """Return after how many tokens to hang up; None for half of the requests."""
        return self.rng.randrange(1, max_tokens + 1) if self.rng.random() < 0.5 else None

    def _length(self, least: int, most: int) -> int:
        return min(most, int(least * (most / least) ** self.rng.random()))


async def stream(
    server: tuple[aiohttp.ClientSession, str, str], draw: SoakRequest, until: float, counts: dict[str, int]
) -> None:
    """Send requests one after another; `server` is the client, the gateway's URL and the model."""
    http, url, model = server
    while time.monotonic() < until:
        max_tokens = draw.max_tokens()
        leave_after = draw.leave_after(max_tokens)
        body = body_of(model, draw.prompt_ids(), max_tokens, draw.sampling())
        answer = await ask(http, url, body, max_tokens, leave_after)
        if answer.error.startswith("429"):
            counts["overloaded"] += 1
            await asyncio.sleep(draw.rng.random())
        elif answer.error:
            counts["failed"] += 1
            print(answer.error, file=sys.stderr)
            await asyncio.sleep(0.5)
        else:
            counts["finished" if leave_after is None else "left"] += 1


async def sample_memory(system: System, until: float) -> list[dict[str, int]]:
    """Return the resident bytes of each process of the system, every ten seconds."""
    processes = pids(system.nodes())
    samples = []
    while time.monotonic() < until:
        samples.append({name: psutil.Process(pid).memory_info().rss for name, pid in processes.items()})
        await asyncio.sleep(min(SAMPLE_S, max(0.1, until - time.monotonic())))
    return samples


def wait_clean(system: System) -> dict[str, bool]:
    """Return whether each worker's pool accounts for every page and holds none, once all is quiet."""
    deadline = time.monotonic() + CLEAN_TIMEOUT_S
    while True:
        clean = {node["id"]: get_json(f"{node['url']}/health")["core"]["is_clean"] for node in system.workers()}
        if all(clean.values()) or time.monotonic() > deadline:
            return clean
        time.sleep(0.5)


def summarize(samples: list[dict[str, int]], counts: dict[str, int], clean: dict[str, bool]) -> list[ResultRow]:
    """Return the rows; growth is from the end of the first fifth, when caches are warm, to the end."""
    rows = [ResultRow(f"requests {name}", count, "requests") for name, count in counts.items()]
    rows += [ResultRow("pool clean afterwards", int(value), "bool", {"worker": name}) for name, value in clean.items()]
    warm = samples[len(samples) // 5]
    for name, last in samples[-1].items():
        growth = (last - warm[name]) / 2**20
        params = {"process": name, "resident": f"{last / 2**20:.0f} MiB"}
        rows.append(ResultRow("memory growth", round(growth, 1), "MiB", params))
    return rows


if __name__ == "__main__":
    sys.exit(main())
