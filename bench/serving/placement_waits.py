"""The waits of prompts behind placements by old views, simulated in virtual time.

Gateways that read the pool now and then stand beside one choice that knows all; policy, view and claim are the real
ones.

python -m bench.serving.placement_waits
"""

import argparse
import asyncio
import heapq
import logging
import statistics
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from unittest.mock import patch

from bench.report.result import ResultRow, write_result
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.node import NodeInfo, NodeLoad, TransferCapabilities, WorkerRole
from coordinator.placement import placer as placing
from coordinator.placement import policy
from coordinator.placement.placer import Placer, PlaceRequest
from testing.memory_store import MemoryStore

LOAD = 0.85
NUM_GATEWAYS = 4
POOLS = (8, 64, 200)
NUM_REQUESTS, NUM_WARM = 8000, 1000
RATE = 60_000.0
MEAN_TOKENS = 4096
SERVICE_S = MEAN_TOKENS / RATE
CAPACITY_TOKENS = 10_000_000
SEEDS = (0, 1, 2)
LEASE_S = 1e6

log = logging.getLogger("bench")


@dataclass(frozen=True)
class Way:
    """A way to place.

    `num_offered`, `top`: how many workers are offered, and of how many pairs are made. `age_s`: how old a view may be.
    """

    name: str
    num_offered: int
    top: int
    age_s: float


ALL_KNOWING = Way("all is known at each choice", 1_000_000, 1_000_000, -1.0)
WAYS = (
    ALL_KNOWING,
    Way("old views, the cheapest of those offered claimed", policy.NUM_OFFERED, policy.TOP, placing.CHANGES_PERIOD_S),
    Way("old views alone", 1, policy.TOP, placing.CHANGES_PERIOD_S),
)


def main() -> int:
    """Simulate each pool in each way. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="result file")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    rows = [row for num_workers in POOLS for row in _rows(num_workers)]
    config = {"load": LOAD, "gateways": NUM_GATEWAYS, "requests": NUM_REQUESTS, "seeds": SEEDS, "tokens": MEAN_TOKENS}
    write_result(options.out, "placement-waits", rows, config)
    return 0


def _rows(num_workers: int) -> list[ResultRow]:
    """Times in those that a prompt of mean length takes to compute; first tokens also of each seed alone."""
    found: list[ResultRow] = []
    best: dict[str, float] = {}
    for way in WAYS:
        waits = [asyncio.run(_simulate(num_workers, way, seed)) for seed in SEEDS]
        figures = _figures(waits)
        best = best or figures
        for name, value in figures.items():
            params = {"workers": num_workers, "placed by": way.name}
            found.append(ResultRow(name, value, "service times", params, None, ALL_KNOWING.name, best[name]))
            log.warning("%s %s: %.4f (all-knowing %.4f)", name, params, value, best[name])
    return found


def _figures(waits: list[list[float]]) -> dict[str, float]:
    """Return the figures of the waits of each seed, in service times."""
    every = sorted(wait for those in waits for wait in those)
    means = zip(SEEDS, map(statistics.mean, waits), strict=True)
    return {
        "first token, mean": 1 + statistics.mean(every) / SERVICE_S,
        **{f"first token, mean, seed {seed}": 1 + mean / SERVICE_S for seed, mean in means},
        "wait, mean": statistics.mean(every) / SERVICE_S,
        "wait, p99": every[int(len(every) * 0.99)] / SERVICE_S,
    }


async def _simulate(num_workers: int, way: Way, seed: int) -> list[float]:
    """Return what each prompt waits before it is computed, in seconds. Answers have one token."""
    random, clock = Random(seed), _Clock()
    store = MemoryStore(alive_s=inf, clock=lambda: clock.now)
    for index in range(num_workers):
        info = _worker(index)
        await store.join(info)
        load = NodeLoad(prefill_rate=RATE, decode_rate=3000.0, free_tokens=CAPACITY_TOKENS)
        await store.heartbeat(info.worker_id, info.incarnation, load)
    gateways = [Placer(store, lambda: clock.now) for _ in range(NUM_GATEWAYS)]
    free_s = dict.fromkeys((f"worker-{index:04}" for index in range(num_workers)), 0.0)
    ends: list[tuple[float, str]] = []
    waits: list[float] = []
    with patch.object(placing, "CHANGES_PERIOD_S", way.age_s), patch.object(policy, "choose", _choose(way)):
        for index in range(NUM_REQUESTS):
            clock.now += random.expovariate(LOAD * num_workers / SERVICE_S)
            while ends and ends[0][0] <= clock.now:
                await store.finish(RequestId(heapq.heappop(ends)[1]), Epoch(1))
            gateway = gateways[index % NUM_GATEWAYS]
            if way is ALL_KNOWING:
                await gateway.nodes()
            num_tokens = max(1, int(random.expovariate(1 / MEAN_TOKENS)))
            route = await gateway.place(_request(f"r{index}", num_tokens))
            await asyncio.sleep(0)  # a read beside it ends here
            worker = route.prefill.worker_id
            waits.append(max(0.0, free_s[worker] - clock.now))
            free_s[worker] = max(free_s[worker], clock.now) + num_tokens / RATE
            heapq.heappush(ends, (free_s[worker], f"r{index}"))
    for gateway in gateways:
        await gateway.close()
    return waits[NUM_WARM:]


class _Clock:
    now = 0.0


def _choose(way: Way):
    """The policy's, with another number of offers."""
    choose = policy.choose

    def chosen(*args, **options):
        return choose(*args, **options, num_offered=way.num_offered, top=way.top)

    return chosen


def _request(name: str, num_tokens: int) -> PlaceRequest:
    return PlaceRequest(
        request_id=RequestId(name), gateway_id=GatewayId("g"), num_tokens=num_tokens, max_tokens=1, lease_s=LEASE_S
    )


def _worker(index: int) -> NodeInfo:
    return NodeInfo(
        worker_id=WorkerId(f"worker-{index:04}"),
        incarnation=Incarnation("a"),
        role=WorkerRole.PREFILL,
        url="",
        transfer="",
        model="model",
        layout_id="l",
        max_model_len=1_000_000,
        capacity_tokens=CAPACITY_TOKENS,
        version="0",
        pid=1,
        core_pid=2,
        ways=TransferCapabilities(memory="cuda", sends=[], takes={}),
    )


if __name__ == "__main__":
    raise SystemExit(main())
