"""The benchmark of changing roles: a pair swaps its roles under load, again and again.

    python -m bench.serving.role_changes --swaps 6

Prefill turns to mixed, decode to prefill, the first to decode. Between the swaps the same prompts are asked, whose KV
both workers have: are they found as before, by whichever worker computes prompts now? The peer is what a change of
roles took before: the pair is started again.
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.load.client import StreamResult, ask, body_of, random_prompt, session
from bench.report.result import ResultRow, write_result
from bench.system.local_system import System, get_json, running
from process.local_http import open_local

SECRET = "role-changes"  # of systems that live for this benchmark
PROBE_TOKENS, LOAD_TOKENS, ANSWER_TOKENS = 512, 96, 24
FORMER_TIMEOUT_S, SETTLE_S = 120.0, 0.6
"""A worker says ten times a second what runs, and a gateway reads twice a second who has which role."""
FLAGS = ("--dtype", "float32", "--prefill", "1", "--decode", "1")


@dataclass
class TimedChange:
    """One change of one worker: until the registry had it, and until its last former request had ended."""

    role: str
    changed_s: float
    ended_s: float


@dataclass
class SwapRun:
    """What the load saw while roles changed, and between."""

    turns: list[TimedChange] = field(default_factory=list)
    swaps_s: list[float] = field(default_factory=list)
    answers: list[StreamResult] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    num_wrong: int = 0


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse()
    rng = random.Random(args.seed)
    probes = [random_prompt(PROBE_TOKENS, rng) for _ in range(args.probes)]
    settings = {"TANDEM_SECRET": SECRET, "TANDEM_NUM_THREADS": "1"}
    with running(*FLAGS, **settings) as system:
        run = asyncio.run(swap_under_load(system, probes, args.swaps, args.streams, rng))
    start = time.perf_counter()
    with running(*FLAGS, **settings) as system:
        started_s = time.perf_counter() - start
        cold = asyncio.run(ask_probes(system, probes))
    rows = rows_of(run, len(probes), started_s, cold)
    config = {"model": "default", "flags": " ".join(FLAGS), "machine": args.machine, "seed": args.seed}
    config |= {"swaps": args.swaps, "streams": args.streams, "probes": args.probes, "probe_tokens": PROBE_TOKENS}
    logging.info("%s", write_result(args.out, "role-changes", rows, config).with_suffix(".md").read_text("utf-8"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=6)
    parser.add_argument("--streams", type=int, default=4, help="answers at once, besides the probes")
    parser.add_argument("--probes", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", default="", help="what else it does, for the result file")
    parser.add_argument("--out", type=Path, default=None, help="result file")
    return parser.parse_args()


async def swap_under_load(
    system: System, probes: list[list[int]], num_swaps: int, num_streams: int, rng: random.Random
) -> SwapRun:
    """Swap the roles `num_swaps` times, and return what was seen."""
    run = SwapRun()
    await ask_probes(system, probes)  # computed by one worker, moved to the other
    expected, hits = await measured(system, probes)
    note(run, expected, expected, hits)
    first, second = (worker["url"] for worker in system.workers())
    for _ in range(num_swaps):
        done = asyncio.Event()
        load = [asyncio.create_task(stream(system, rng.randrange(1 << 30), done, run)) for _ in range(num_streams)]
        await asyncio.sleep(2.0)  # answers of both roles run
        begun = time.perf_counter()
        for url, role in ((first, "mixed"), (second, "prefill"), (first, "decode")):
            run.turns.append(await asyncio.to_thread(turn, url, role))
        run.swaps_s.append(time.perf_counter() - begun)
        done.set()
        await asyncio.gather(*load)
        first, second = second, first
        answers, hits = await measured(system, probes)
        note(run, expected, answers, hits)
    return run


async def stream(system: System, seed: int, done: asyncio.Event, run: SwapRun) -> None:
    """Ask for one answer after the other until `done`."""
    rng, model = random.Random(seed), system.model()
    async with session() as http:
        while not done.is_set():
            body = body_of(model, random_prompt(LOAD_TOKENS, rng), ANSWER_TOKENS)
            run.answers.append(await ask(http, system.url, body, ANSWER_TOKENS))


async def measured(system: System, probes: list[list[int]]) -> tuple[list[StreamResult], float]:
    """Return the answers to the probes, and how many tokens of them workers had in their caches."""
    before = prefix_hits(system)
    answers = await ask_probes(system, probes)
    await asyncio.sleep(0.3)  # a worker reports ten times a second
    return answers, prefix_hits(system) - before


async def ask_probes(system: System, probes: list[list[int]]) -> list[StreamResult]:
    """Return the answers to the probes, asked one after the other. Raises RuntimeError for one that fails."""
    model, answers = system.model(), list[StreamResult]()
    async with session() as http:
        for probe in probes:
            answers.append(await ask(http, system.url, body_of(model, probe, ANSWER_TOKENS), ANSWER_TOKENS))
    if failed := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(f"a prompt that is asked again failed: {failed[0]}")
    return answers


def note(run: SwapRun, expected: Sequence[StreamResult], answers: Sequence[StreamResult], hits: float) -> None:
    run.hits.append(hits)
    run.ttfts_s += [answer.ttft_s for answer in answers]
    run.num_wrong += sum(one.text != other.text for one, other in zip(expected, answers, strict=True))


def prefix_hits(system: System) -> float:
    workers = [get_json(f"{worker['url']}/health")["core"] for worker in system.workers()]
    return sum(core["counters"]["prefix_hit_tokens"] for core in workers)


def turn(url: str, role: str) -> TimedChange:
    """Give a worker a role, and wait for the end of its former requests. Raises TimeoutError."""
    begun = time.perf_counter()
    request = urllib.request.Request(
        f"{url}/role", json.dumps({"role": role}).encode(), {"Authorization": f"Bearer {SECRET}"}
    )
    with open_local(request, timeout_s=10) as response:
        changed: dict[str, Any] = json.load(response)
    changed_s = time.perf_counter() - begun
    logging.info("%s is %s, was %s: %.3f s", url, changed["role"], changed["was"], changed_s)
    seen_s = begun
    while time.perf_counter() - seen_s < SETTLE_S:
        if get_json(f"{url}/health")["num_of_former_role"]:
            seen_s = time.perf_counter()
        if seen_s - begun > FORMER_TIMEOUT_S:
            raise TimeoutError(f"requests of the former role still run at {url} after {FORMER_TIMEOUT_S:.0f} s")
        time.sleep(0.02)
    return TimedChange(role, changed_s, seen_s - begun)


def rows_of(run: SwapRun, num_probes: int, started_s: float, cold: Sequence[StreamResult]) -> list[ResultRow]:
    failed = [answer for answer in run.answers if answer.error]
    for answer in failed:
        logging.warning("failed: %s", answer.error)
    peer = "the pair started again"
    cold_ms = 1e3 * statistics.median(answer.ttft_s for answer in cold)
    ended_s = [turn.ended_s for turn in run.turns if turn.role != "mixed"]  # which has every side
    load = {"requests": len(run.answers), "changes": len(run.turns)}
    return [
        ResultRow("failed requests under load", len(failed), "requests", load),
        ResultRow("wrong answers to prompts asked again", run.num_wrong, "answers", {"asked": len(run.ttfts_s)}),
        ResultRow("prompt tokens found, before the first swap", run.hits[0], "tokens", {"prompts": num_probes}),
        ResultRow(
            "prompt tokens found, least after a swap", min(run.hits[1:]), "tokens", {"prompts": num_probes}, run.hits[0]
        ),
        ResultRow(
            "change known to the registry, median", 1e3 * statistics.median(t.changed_s for t in run.turns), "ms"
        ),
        ResultRow("change known to the registry, longest", 1e3 * max(t.changed_s for t in run.turns), "ms"),
        ResultRow("last request of the former role ended, median", statistics.median(ended_s), "s"),
        ResultRow("last request of the former role ended, longest", max(ended_s), "s"),
        ResultRow("swap of both roles, median", statistics.median(run.swaps_s), "s", {}, None, peer, started_s),
        ResultRow(
            "first token of a prompt asked again, median",
            1e3 * statistics.median(run.ttfts_s),
            "ms",
            {"tokens": PROBE_TOKENS},
            None,
            peer,
            cold_ms,
        ),
    ]


if __name__ == "__main__":
    main()
