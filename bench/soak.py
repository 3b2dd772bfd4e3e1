"""Many streams, half of which hang up at random: does every page come back, does memory stay flat?

python -m bench.soak --minutes 10 --streams 200
"""

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

import aiohttp
import psutil

from bench.client import ask, random_prompt, session
from bench.result import Row, write_result
from bench.system import System, get_json, running

SAMPLE_S = 10.0
CLEAN_TIMEOUT_S = 60.0
POOL = {"TANDEM_KV_CACHE_MIB": "256"}
"""Small enough to be used in full within the first minutes: growth after that is a leak, not first use."""


def main() -> int:
    args = parse()
    flags = ["--prefill", "1", "--decode", "1", "--transfer", args.transfer]
    with running(*flags, **POOL) as system:
        samples, counts = asyncio.run(soak(system, args.streams, args.minutes * 60.0, args.seed))
        clean = wait_clean(system)
        rows = summarize(samples, counts, clean)
        for row in rows:
            print(f"{row.name:24s} {row.value:>12} {row.unit:10s} {dict(row.params)}")
        config = {"streams": args.streams, "minutes": args.minutes, "transfer": args.transfer, "seed": args.seed}
        write_result(args.out, "soak", rows, config)
    return 0 if all(clean.values()) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200, help="concurrent streams")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="result file")
    return parser.parse_args()


async def soak(
    system: System, num_streams: int, seconds: float, seed: int
) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Keep `num_streams` open until the time is up. Returns memory samples (bytes by process) and outcome counts."""
    counts = {"finished": 0, "left": 0, "overloaded": 0, "failed": 0}
    until, model = time.monotonic() + seconds, system.model()
    sampling = asyncio.create_task(sample_memory(system, until))
    async with session() as http:
        streams = [stream(http, system.url, model, random.Random(seed + i), until, counts) for i in range(num_streams)]
        await asyncio.gather(*streams)
    return await sampling, counts


async def stream(
    http: aiohttp.ClientSession, url: str, model: str, rng: random.Random, until: float, counts: dict[str, int]
) -> None:
    while time.monotonic() < until:
        max_tokens = rng.randrange(1, 48)
        leave_after = rng.randrange(1, max_tokens + 1) if rng.random() < 0.5 else None
        answer = await ask(http, url, model, random_prompt(rng.randrange(4, 64), rng), max_tokens, leave_after)
        if answer.error.startswith("429"):
            counts["overloaded"] += 1
            await asyncio.sleep(rng.random())
        elif answer.error:
            counts["failed"] += 1
            print(answer.error, file=sys.stderr)
            await asyncio.sleep(0.5)
        else:
            counts["finished" if leave_after is None else "left"] += 1


async def sample_memory(system: System, until: float) -> list[dict[str, int]]:
    """Resident bytes of each process of the system, every ten seconds."""
    pids = {f"{node['role']} {node['id']}": node["pid"] for node in system.nodes()}
    pids |= {f"{node['role']} {node['id']} core": node["core_pid"] for node in system.nodes() if node.get("core_pid")}
    samples = []
    while time.monotonic() < until:
        samples.append({name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()})
        await asyncio.sleep(min(SAMPLE_S, max(0.1, until - time.monotonic())))
    return samples


def wait_clean(system: System) -> dict[str, bool]:
    """Whether each worker's pool has every page accounted for and none held, once all is quiet."""
    deadline = time.monotonic() + CLEAN_TIMEOUT_S
    while True:
        clean = {node["id"]: get_json(f"{node['url']}/health")["core"]["is_clean"] for node in system.workers()}
        if all(clean.values()) or time.monotonic() > deadline:
            return clean
        time.sleep(0.5)


def summarize(samples: list[dict[str, int]], counts: dict[str, int], clean: dict[str, bool]) -> list[Row]:
    """Growth is from the end of the first fifth (caches warm) to the end."""
    rows = [Row(f"requests {name}", count, "requests") for name, count in counts.items()]
    rows += [Row("pool clean afterwards", int(value), "bool", {"worker": name}) for name, value in clean.items()]
    warm = samples[len(samples) // 5]
    for name, last in samples[-1].items():
        growth = (last - warm[name]) / 2**20
        params = {"process": name, "resident": f"{last / 2**20:.0f} MiB"}
        rows.append(Row("memory growth", round(growth, 1), "MiB", params))
    return rows


if __name__ == "__main__":
    sys.exit(main())
