"""The benchmark of a worker that is drained, beside one that is killed and whose answers are replayed.

    python -m bench.serving.migration [--answers 64] [--tokens 200] [--rounds 1] [--machine TEXT] [--out FILE]

All answers run on one of two decode workers: the other one is restarted as they are asked, and is back by the time they
are to go there. Each way has the same requests in the same system. Texts are compared with those of a run in which
nothing was disturbed.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from bench.load.client import StreamResult, ask, body_of, random_prompt, session
from bench.report.result import ResultRow, write_result
from bench.system.local_system import System, get_json, running
from process.local_http import open_local

PROMPT_TOKENS = 64
DEADLINE_S = 300.0
SETTINGS = {"TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "1024", "TANDEM_MAX_NUM_SEQS": "80"}
PEER = "replay: the worker is killed"


@dataclass(frozen=True)
class DrainRun:
    """One run: its answers, and how long it took until the worker had none of them any more."""

    answers: list[StreamResult]
    leave_s: float = 0.0

    @property
    def longest_gaps_s(self) -> list[float]:
        return sorted(max(answer.gaps_s, default=0.0) for answer in self.answers)

    def num_wrong(self, undisturbed: "DrainRun") -> int:
        """Return how many answers failed, or have another text than without a disturbance."""
        return sum(a.error != "" or a.text != b.text for a, b in zip(self.answers, undisturbed.answers, strict=True))


def main(arguments: list[str]) -> int:
    """Measure and write the result. Returns 1 if a moved answer was not right."""
    options = _parser().parse_args(arguments)
    with running("--dtype", "float32", "--decode", "2", **SETTINGS) as system:
        undisturbed, moved, killed = asyncio.run(_all_ways(system, options))
        migrations = _metric(system, 'tandem_gateway_migrations_total{outcome="committed"}')
    rows = _rows(undisturbed, moved, killed, migrations)
    config = {
        "answers": options.answers,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "machine": options.machine,
    }
    path = write_result(options.out, "migration", rows, config)
    print(path.with_suffix(".md").read_text())
    return int(any(way.num_wrong(undisturbed) for way in moved))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--machine", default="quiet")
    parser.add_argument("--out", type=Path)
    return parser


async def _all_ways(system: System, options: argparse.Namespace) -> tuple[DrainRun, list[DrainRun], list[DrainRun]]:
    bodies, moved, killed = _bodies(system, options), [], []
    undisturbed = await _run(system, bodies, options.tokens, None)
    for _ in range(options.rounds):
        moved.append(await _run(system, bodies, options.tokens, lambda w: os.kill(w["pid"], signal.SIGTERM)))
        killed.append(await _run(system, bodies, options.tokens, lambda w: os.kill(w["core_pid"], signal.SIGKILL)))
    return undisturbed, moved, killed


def _bodies(system: System, options: argparse.Namespace) -> list[bytes]:
    """Return requests of which every other one is greedy, and the rest are drawn by seeds."""
    rng, model, bodies = random.Random(1), system.model(), []
    for number in range(options.answers):
        sampling = {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "seed": number}
        bodies.append(body_of(model, random_prompt(PROMPT_TOKENS, rng), options.tokens, sampling))
    return bodies


async def _run(
    system: System, bodies: list[bytes], num_tokens: int, disturb: Callable[[dict], None] | None
) -> DrainRun:
    """Ask all at once on one worker; once all answer and the other worker is there, disturb that one."""
    first, second = [worker for worker in system.workers() if worker["role"] == "decode"]
    os.kill(second["pid"], signal.SIGTERM)
    await _until(lambda: not psutil.pid_exists(second["pid"]))
    async with session() as http:
        asked = asyncio.create_task(_ask_all(http, system, bodies, num_tokens))
        await _until(lambda: _num_requests(first) == len(bodies) or asked.done())
        await _until(system.is_up)
        begin_s = time.perf_counter()
        if disturb is not None:
            disturb(first)
            await _until(lambda: not psutil.pid_exists(first["pid"]))
        leave_s = time.perf_counter() - begin_s
        answers = await asked
    await _until(system.is_up)
    return DrainRun(answers, leave_s)


async def _ask_all(
    http: aiohttp.ClientSession, system: System, bodies: list[bytes], num_tokens: int
) -> list[StreamResult]:
    return await asyncio.gather(*(ask(http, system.url, body, num_tokens) for body in bodies))


def _num_requests(worker: dict) -> int:
    return int(get_json(f"{worker['url']}/health")["core"]["gauges"]["running"])


async def _until(is_so: Callable[[], bool]) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(DEADLINE_S):
        while not await asyncio.to_thread(is_so):
            await asyncio.sleep(0.02)


def _metric(system: System, name: str) -> float:
    with open_local(f"{system.url}/metrics", timeout_s=10) as response:
        lines = [line for line in response.read().decode().splitlines() if line.startswith(f"{name} ")]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0


def _rows(undisturbed: DrainRun, moved: list[DrainRun], killed: list[DrainRun], migrations: float) -> list[ResultRow]:
    gaps = [sorted(gap for way in ways for gap in way.longest_gaps_s) for ways in ([undisturbed], moved, killed)]
    rows = [ResultRow("answers moved", migrations, "")]
    for name, share in (("p50", 0.5), ("p99", 0.99), ("most", 1.0)):
        calm, of_moved, of_killed = (each[min(len(each) - 1, int(share * len(each)))] for each in gaps)
        rows.append(ResultRow(f"longest gap of an answer without a disturbance, {name}", calm, "s"))
        rows.append(ResultRow(f"longest gap of an answer, {name}", of_moved, "s", peer=PEER, peer_value=of_killed))
    wrong, peer_wrong = (sum(way.num_wrong(undisturbed) for way in ways) for ways in (moved, killed))
    rows.append(ResultRow("answers that failed or have another text", wrong, "", peer=PEER, peer_value=peer_wrong))
    longest = max(way.leave_s for way in moved)
    rows.append(ResultRow("from the signal to the end of the process", longest, "s"))
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
