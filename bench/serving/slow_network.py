"""The benchmark of KV over a slow network: handoffs at 100 Mbit/s, and a store behind 1 Gbit/s.

    python -m bench.serving.slow_network [--rounds 3] [--tokens 4096] [--only handoff|store|load] [--out FILE]

All processes share a network namespace of the benchmark's own, whose loopback interface a token bucket filter limits;
this needs root, `ip` and `tc`. The systems run side by side and take turns. Those of `handoff` and `store` differ in
`--kv-codec` alone; what the levels lose is measured by bench.handoff.codec. Those of `load` differ in whether decode
has a memory tier: of a prompt that it had before, its cache has nothing more, and the tier all.
"""

import argparse
import asyncio
import ctypes
import logging
import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.load.client import StreamResult, answered, random_prompt
from bench.report.result import ResultRow, write_result
from bench.system.local_system import get_json, is_ready, model_of
from bench.system.services import Services
from coordinator.store.local_server import RedisServer

HANDOFF_MBIT, STORE_MBIT = 100, 1000
HANDOFF_LEVELS, STORE_LEVELS = ("off", "auto", "8bit", "4bit"), ("off", "4bit")
DECODE_TIERS: Mapping[str, tuple[str, ...]] = {"none": (), "memory": ("--kv-host-gib", "1")}
MAX_TOKENS = 4
CLONE_NEWNET = 0x40000000
START_TIMEOUT_S, SETTLE_TIMEOUT_S, QUIET_S = 300.0, 120.0, 300.0
COMMON = {"TANDEM_DTYPE": "float32", "TANDEM_TRANSFER": "tcp"}
_log = logging.getLogger(__name__)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse()
    if reason := limit_network():
        _log.warning("skipped: %s", reason)
        return
    rows: list[ResultRow] = []
    for part, (mbit, measure) in PARTS.items():
        if args.only in (None, part):
            set_rate(mbit)
            rows += asyncio.run(measure(args))
    for row in rows:
        _log.info("%s %s %.4g %s", row.name, dict(row.params), row.value, row.unit)
    load = f"{os.getloadavg()[0]:.1f} before the end, of {os.cpu_count()} cores"
    config = {"rounds": args.rounds, "tokens": args.tokens, "handoff_mbit": HANDOFF_MBIT, "store_mbit": STORE_MBIT}
    _log.info("%s", write_result(args.out, "slow-network", rows, config | {"load": load, "note": args.note}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--note", default="", help="for the result file, such as how busy the machine was")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def limit_network() -> str:
    """Enter a network namespace of our own; return why that can't be, or an empty text."""
    if not (shutil.which("ip") and shutil.which("tc")):
        return "it needs ip and tc, of the package iproute2"
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        return f"a network namespace needs root: {os.strerror(ctypes.get_errno())}"
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=10)
    return ""


def set_rate(mbit: int) -> None:
    """Limit the loopback interface of the namespace."""
    limit = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", *limit], check=True, timeout=10)


@contextmanager
def systems(workers: Mapping[str, Mapping[str, tuple[str, ...]]]) -> Iterator[dict[str, Services]]:
    """Run systems side by side; `workers`: the flags of each one's workers by name."""
    with ExitStack() as stack:
        running: dict[str, Services] = {}
        for name, flags in workers.items():
            services = Services(Path(stack.enter_context(TemporaryDirectory())), flags, **COMMON)
            running[name] = stack.enter_context(services)
            for service in (*flags, "gateway"):
                services.start(service)
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not is_ready(services.url):
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"the system {name} is not ready")
                time.sleep(0.2)
        yield running


async def timed(services: Services, prompt: list[int]) -> StreamResult:
    return await answered(services.url, model_of(services.url), prompt, MAX_TOKENS, QUIET_S)


async def handoffs(args: argparse.Namespace) -> list[ResultRow]:
    """Return the gaps between token 0 and token 1 by `--kv-codec`, and how much each link compressed."""
    flags = "--kv-cache-mib", str(args.tokens * 46 // 1024 + 64)
    workers = {codec: pair((*flags, "--kv-codec", codec)) for codec in HANDOFF_LEVELS}
    rng, gaps, firsts = random.Random(0), {}, {}
    with systems(workers) as running:
        for services in running.values():
            await timed(services, random_prompt(64, rng))
        for turn in range(args.rounds):
            for codec, services in running.items():
                answer = await timed(services, random_prompt(args.tokens, rng))
                gaps.setdefault(codec, []).append(answer.gaps_s[0])
                firsts.setdefault(codec, []).append(answer.ttft_s)
                _log.info("%d %s: gap %.2f s, first %.2f s", turn, codec, answer.gaps_s[0], answer.ttft_s)
        ratios = {codec: ratio(services) for codec, services in running.items()}
    rows = []
    for codec, found in gaps.items():
        params = {"codec": codec, "link_mbit": HANDOFF_MBIT, "prompt": args.tokens, "ratio": round(ratios[codec], 2)}
        rows += [beside("gap between token 0 and 1", found, gaps["off"], params)]
        rows += [beside("first token", firsts[codec], firsts["off"], params)]
    return rows


def pair(flags: tuple[str, ...], of_decode: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """Return the flags of a prefill and a decode worker."""
    return {"p": ("--role", "prefill", *flags), "d": ("--role", "decode", *flags, *of_decode)}


async def loads(args: argparse.Namespace) -> list[ResultRow]:
    """Return the gaps between token 0 and 1 of prompts that prefill has, and a tier of decode may have."""
    one_mib = (
        args.tokens * 45 // 1024 + 2
    )  # decode's cache holds one prompt, so that two that take turns evict each other
    caches = "--kv-cache-mib", str(3 * one_mib), "--kv-codec", "off"
    workers = {name: pair(caches, ("--kv-cache-mib", str(one_mib), *tier)) for name, tier in DECODE_TIERS.items()}
    rng, gaps = random.Random(2), {}
    prompts = [random_prompt(args.tokens, rng) for _ in range(2)]
    with systems(workers) as running:
        for name, services in running.items():
            for prompt in prompts:
                await timed(services, prompt)
                if DECODE_TIERS[name]:
                    await stored(services, "d", "host")
        for turn in range(2 * args.rounds):
            for name, services in running.items():
                answer = await timed(services, prompts[turn % 2])
                gaps.setdefault(name, []).append(answer.gaps_s[0])
                _log.info("%d tier of decode: %s: gap %.2f s", turn, name, answer.gaps_s[0])
        counts = {
            name: counters(services, "d").get("kv_handoff_loaded_blocks", 0) for name, services in running.items()
        }
    rows = []
    for name, found in gaps.items():
        num = round(counts[name] / (2 * args.rounds), 1)
        params = {"tier of decode": name, "link_mbit": HANDOFF_MBIT, "prompt": args.tokens, "loaded_blocks": num}
        rows.append(
            beside("gap after a prompt that decode had before", found, gaps["none"], params, "no tier at decode")
        )
    return rows


def ratio(services: Services) -> float:
    """Return how many times smaller what prefill sent was than its KV."""
    levels = [
        level
        for link in get_json(f"{services.facts('p')['url']}/health")["core"]["links"]
        for level in link["levels"].values()
    ]
    wire = sum(level["wire_nbytes"] for level in levels)
    return sum(level["nbytes"] for level in levels) / wire if wire else 1.0


async def stores(args: argparse.Namespace) -> list[ResultRow]:
    """Return the times to the first token by `--kv-codec` of prompts that a store holds."""
    # The cache holds one prompt (of 45 KiB a token), so that two that take turns are loaded from the store each time.
    flags = "--role", "mixed", "--kv-cache-mib", str(args.tokens * 45 // 1024 + 2)
    rng, firsts, computed = random.Random(1), {}, []
    with ExitStack() as stack:
        workers = {}
        for codec in STORE_LEVELS:
            store = stack.enter_context(RedisServer())
            workers[codec] = {"m": (*flags, "--kv-store", store.url, "--kv-codec", codec)}
        running = stack.enter_context(systems(workers))
        prompts = [random_prompt(args.tokens, rng) for _ in range(2)]
        for services in running.values():
            for prompt in prompts:
                computed.append((await timed(services, prompt)).ttft_s)
                await stored(services, "m", "store")
        for turn in range(2 * args.rounds):
            for codec, services in running.items():
                first_s = (await timed(services, prompts[turn % 2])).ttft_s
                firsts.setdefault(codec, []).append(first_s)
                _log.info("%d %s: first %.2f s", turn, codec, first_s)
                await stored(services, "m", "store")
        counts = {codec: counters(services, "m") for codec, services in running.items()}
    rows = [beside("first token, computed", computed, computed, {"codec": "none", "prompt": args.tokens})]
    for codec, found in firsts.items():
        num = counts[codec].get("kv_loaded_blocks", 0.0) / (2 * args.rounds)
        params = {"codec": codec, "store_mbit": STORE_MBIT, "prompt": args.tokens, "loaded_blocks": round(num, 1)}
        rows.append(beside("first token from the store", found, firsts["off"], params))
    return rows


def counters(services: Services, worker: str) -> dict[str, float]:
    return get_json(f"{services.facts(worker)['url']}/health")["core"]["counters"]


async def stored(services: Services, worker: str, tier: str) -> None:
    """Wait until the tier has what the worker has: until it takes nothing for two seconds."""
    deadline_s, before, since_s = time.monotonic() + SETTLE_TIMEOUT_S, -1.0, time.monotonic()
    while time.monotonic() - since_s < 2:
        now = counters(services, worker).get(f"kv_{tier}_stored_blocks", 0.0)
        if now != before:
            before, since_s = now, time.monotonic()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the tier {tier} is still being written to")
        await asyncio.sleep(0.25)


def beside(
    name: str,
    values: list[float],
    without: list[float],
    params: Mapping[str, object],
    peer_name: str = "--kv-codec off",
) -> ResultRow:
    """Return the median of `values` in seconds, beside that of the same `without` what is measured."""
    peer = None if values is without else peer_name
    peer_value = None if values is without else statistics.median(without)
    return ResultRow(name, statistics.median(values), "s", params, peer=peer, peer_value=peer_value)


PARTS = {"handoff": (HANDOFF_MBIT, handoffs), "store": (STORE_MBIT, stores), "load": (HANDOFF_MBIT, loads)}

if __name__ == "__main__":
    main()
