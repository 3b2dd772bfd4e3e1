"""The cost of a placement for Redis and a gateway, by the numbers of workers and of gateways.

python -m bench.serving.placement [--before FOLDER]

`--before`: a checkout of another commit, measured in the same run, in turns with this one: `git worktree add FOLDER
COMMIT`. Workers are names in a real Redis server, which change once a second as if they beat.
"""

import argparse
import asyncio
import gc
import importlib.util
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
POOLS = (8, 64, 256, 1000, 4000)
GATEWAYS = (1, 4)
PROMPT_TOKENS = 8192
NUM_PROMPTS = 32
"""Prompts that come again: as many conversations."""
NUM_ALONE, NUM_PLACED = 300, 100
"""Placements that are measured where nothing else is asked of Redis, and of each gateway while it reads as well."""
RATE = 25.0
"""Placements a second of each gateway."""
CAPACITY_TOKENS = 4_000_000
MAX_NOTED = 100_000
PLACING = ("place", "prefixes", "claim")
"""The scripts of a placement: those of today, or the one that there was."""

log = logging.getLogger("bench")


def main() -> int:
    """Measure every pool and number of gateways. Returns the exit code."""
    options = _arguments()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if options.child:
        print(json.dumps(asyncio.run(CHILDREN[options.child](json.loads(options.given)))), flush=True)
        return 0
    from bench.report.result import write_result

    rows = [
        row
        for num_workers in options.pools
        for num_gateways in GATEWAYS
        for row in _rows(num_workers, num_gateways, options.before)
    ]
    config = {
        "prompt": PROMPT_TOKENS, "prompts": NUM_PROMPTS, "placed alone": NUM_ALONE, "placed": NUM_PLACED, "rate": RATE
    }  # fmt: skip
    write_result(options.out, "placement", rows, config)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="result file")
    parser.add_argument("--before", type=_checkout, default=None, help="a checkout to measure beside this one")
    parser.add_argument("--pools", type=int, nargs="+", default=POOLS, help="numbers of workers")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--given", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _checkout(text: str) -> Path:
    from bench.report.result import checkout  # late: a child may run with the packages of an older commit

    return checkout(text)


def _rows(num_workers: int, num_gateways: int, before: Path | None) -> list[Any]:
    from bench.report.result import ResultRow, commit_of

    now = _measured_or_none(ROOT, num_workers, num_gateways)
    then = _measured_or_none(before, num_workers, num_gateways) if before is not None else {}
    peer = f"commit {commit_of(before)}" if before is not None else None
    params = {"workers": num_workers, "gateways": num_gateways}
    rows = [ResultRow(name, value, "ms", params, None, peer, then.get(name)) for name, value in now.items()]
    for row in rows:
        log.warning("%s %s: %.3f ms (before: %s)", row.name, params, row.value, row.peer_value)
    return rows


def _measured_or_none(tree: Path, num_workers: int, num_gateways: int) -> dict[str, float]:
    """Return nothing where placements take longer than a gateway waits for Redis."""
    try:
        return _measured(tree, num_workers, num_gateways)
    except RuntimeError as error:
        log.warning("%s with %d workers and %d gateways: %s", tree, num_workers, num_gateways, error)
        return {}


def _measured(tree: Path, num_workers: int, num_gateways: int) -> dict[str, float]:
    """Figures of one checkout, with a server of its own."""
    from coordinator.store.local_server import RedisServer

    with RedisServer() as server:
        given = {"url": server.url, "num_workers": num_workers}
        _ended(_child(tree, "workers", given))
        quiet = _ended(_child(tree, "gateway", given | {"seed": 0, "reads": False}))
        touching = _child(tree, "beats", given)
        busy = [_child(tree, "gateway", given | {"seed": seed, "reads": True}) for seed in range(num_gateways)]
        try:
            answers = [_ended(gateway) for gateway in busy]
        finally:
            for child in (touching, *busy):
                child.terminate()
                child.wait()
    own_s = sorted(quiet["own_s"])
    beside_s = sorted(second for answer in answers for second in answer["own_s"])
    all_us = statistics.mean(answer["all_us"] for answer in answers)
    return {
        "Redis' own time of a placement": quiet["placement_us"] / 1e3,
        "Redis' own time of a placement, with reading the pool": all_us / num_gateways / NUM_PLACED / 1e3,
        "a gateway's own CPU time of a placement, p50": statistics.median(own_s) * 1e3,
        "a gateway's own CPU time of a placement, p99": own_s[int(len(own_s) * 0.99)] * 1e3,
        "the same with what is read beside it, p50": statistics.median(beside_s) * 1e3,
        "the same with what is read beside it, p99": beside_s[int(len(beside_s) * 0.99)] * 1e3,
    }


def _child(tree: Path, name: str, given: dict[str, Any]) -> "subprocess.Popen[str]":
    """A process that runs this file with the packages of that checkout."""
    command = [sys.executable, "-P", __file__, "--child", name, "--given", json.dumps(given)]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=tree)


def _ended(child: "subprocess.Popen[str]") -> dict[str, Any]:
    output, _ = child.communicate(timeout=600)
    if child.returncode:
        raise RuntimeError(f"a process ended with {child.returncode}")
    return json.loads(output)


async def _register(given: dict[str, Any]) -> None:
    """Half of the workers compute prompts, half answer; none dies of silence."""
    from contracts.ids import Incarnation, WorkerId
    from contracts.node import NodeInfo, NodeLoad, TransferCapabilities, WorkerRole
    from coordinator.store.redis_store import RedisStore

    store = RedisStore(given["url"], "bench", alive_s=86_400.0)
    for index in range(given["num_workers"]):
        info = NodeInfo(
            worker_id=WorkerId(f"worker-{index}"),
            incarnation=Incarnation("a"),
            role=WorkerRole.PREFILL if index % 2 else WorkerRole.DECODE,
            url=f"http://10.0.{index // 250}.{index % 250}:9000",
            transfer=f"10.0.{index // 250}.{index % 250}:9001",
            model="model",
            layout_id="0123456789abcdef",
            max_model_len=131_072,
            capacity_tokens=CAPACITY_TOKENS,
            version="0",
            pid=1,
            core_pid=2,
            ways=TransferCapabilities(
                memory="cuda",
                sends=[f"nvlink@host-{index // 8}", "ucx", "tcp"],
                takes={"0123456789abcdef": [f"nvlink@host-{index // 8}", "ucx", "tcp"]},
            ),
        )
        load = NodeLoad(
            prefill_rate=60_000.0 + index % 100 * 100,
            decode_rate=3000.0,
            transfer_rate=1e6,
            free_tokens=CAPACITY_TOKENS,
            prompt_tokens_per_mixed_step=1024,
        )
        await store.join(info)
        await store.heartbeat(info.worker_id, info.incarnation, load)
    await store.close()


async def _beat(given: dict[str, Any]) -> None:
    """Mark all workers as changed once a second, a part at a time, for a checkout that reads such marks."""
    from redis.asyncio import Redis

    from coordinator.store.redis_store import RedisStore

    prefix = RedisStore(given["url"], "bench").prefix
    names = [f"worker-{index}" for index in range(given["num_workers"])]
    async with Redis.from_url(given["url"]) as redis:
        await redis.slowlog_reset()
        while True:
            for part in range(20):
                now_us = int(time.time() * 1e6)
                if some := {name: now_us for name in names[part::20]}:
                    await redis.zadd(f"{prefix}touched", some)  # type: ignore[arg-type]
                await asyncio.sleep(0.05)


async def _place(given: dict[str, Any]) -> dict[str, Any]:
    """Place, one after another. Not `reads`: nothing but placements is asked of Redis."""
    from redis.asyncio import Redis

    from contracts.ids import Epoch, GatewayId, RequestId
    from coordinator.store.redis_store import RedisStore

    gateway = f"gateway-{given['seed']}-{given['reads']}"
    store = RedisStore(given["url"], "bench")
    placement = _store_placement()(store, GatewayId(gateway))
    prompts = [[(index * 7919 + seed) % 50_000 for index in range(PROMPT_TOKENS)] for seed in range(NUM_PROMPTS)]
    if not given["reads"]:
        _read_no_more()
    for index in range(NUM_PROMPTS):
        await placement.place(RequestId(f"{gateway}-warm-{index}"), Epoch(1), prompts[index], 256, ())
    own_s: list[float] = []
    num_placed = NUM_PLACED if given["reads"] else NUM_ALONE
    gc.collect()
    gc.freeze()  # as a gateway does once it is ready
    async with Redis.from_url(given["url"], socket_timeout=60) as redis:
        await _note_durations(redis)
        for index in range(num_placed):
            began_s, own = time.monotonic(), time.process_time()
            await placement.place(RequestId(f"{gateway}-{index}"), Epoch(1), prompts[index * 31 % NUM_PROMPTS], 256, ())
            own_s.append(time.process_time() - own)
            await asyncio.sleep(max(0.0, began_s + 1 / RATE - time.monotonic()) if given["reads"] else 0.0)
        durations_us = await _durations_us(redis, given)
    await placement.close()
    typical_us = {name: statistics.median(those) for name, those in durations_us.items()}
    return {
        "own_s": own_s,
        "placement_us": sum(typical_us.get(name, 0.0) for name in PLACING),
        "all_us": sum(typical_us[name] * len(those) for name, those in durations_us.items()),
    }


def _store_placement() -> Any:
    """Return the class by which the gateways of that checkout place.

    Older ones have it in a file of another name.
    """
    name = "gateway.dispatch.registry_client"
    module = importlib.import_module(name if importlib.util.find_spec(name) else "gateway.dispatch.placement")
    return module.StorePlacement


def _read_no_more() -> None:
    """Let a checkout that keeps a view keep the one that it has."""
    try:
        from coordinator.placement import placer
    except ImportError:
        return
    placer.CHANGES_PERIOD_S = placer.MIN_PERIOD_S = placer.MAX_AGE_S = 1e9


async def _note_durations(redis: Any) -> None:
    await redis.config_set("slowlog-max-len", MAX_NOTED)
    await redis.config_set("slowlog-log-slower-than", 0)


async def _durations_us(redis: Any, given: dict[str, Any]) -> dict[str, list[int]]:
    """Return how long each run of each script took, by Redis' own clock.

    So a median passes over those in which the host gave its CPU to others.
    """
    from coordinator.store.redis_store import RedisStore

    names = {script.sha: name for name, script in RedisStore(given["url"], "bench")._scripts.items()}
    found: defaultdict[str, list[int]] = defaultdict(list)
    for entry in await redis.slowlog_get(MAX_NOTED):
        command, sha, *_ = (*entry["command"].split(b" ", 2), b"")
        if command == b"EVALSHA" and sha.decode() in names:
            found[names[sha.decode()]].append(entry["duration"])
    return found


CHILDREN = {"workers": _register, "beats": _beat, "gateway": _place}


if __name__ == "__main__":
    sys.exit(main())
