"""The benchmark of the handoff between two GPUs.

`python -m bench.handoff.gpu [raw] [convert] [reshard] [idle] [load] [kill]`

    raw      scattered pages to scattered pages between two processes, by kv_transfer's nvlink transport; with
             `--transfer ucx` between two nodes, see bench.handoff.staged
    convert  between two nodes, from a bf16 cache to an e4m3 one
    reshard  between two nodes, by nvlink or ucx, between pools of one and of two shards; the second shard is in the
             memory of the other side's GPU
    idle     a pair of engine cores, one request at a time: from the last chunk computed to Commit, TTFT beside a
             colocated worker's, token 0 to token 1, and whether the pair's tokens equal those of one worker
    load     the same while decode steps a batch and prefill computes without a pause
    kill     SIGKILL of either side in mid-transfer, again and again: see bench.handoff.kills

The model has Llama-8B's shape and random weights. Cores get their jobs as from a worker's front, without HTTP and
gateway. The added time of a handoff begins when prefill's host learns that the last chunk has been computed, and ends
when decode has sent its Commit.
"""

import argparse
import gc
import json
import logging
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.handoff.core import CoreSpec
from bench.handoff.front import Answers, CoreHandle, ask, cancel, meet, prompt
from bench.handoff.kills import kills
from bench.handoff.raw_pages import LAYOUT, NVLINK_RATE, RAW_BLOCKS, WIDE, fill, holds, raw_pool
from bench.handoff.staged import staged
from bench.report.result import ResultRow, shown, write_result
from engine.cuda.kv.transfer_pool import DeviceTransferPool
from kernels import caps

STAGES = (
    "decode queued", "prefill told", "prefill fin", "prefill sent", "decode heard", "decode landed", "decode commit",
    "decode adopted", "decode started", "decode launched", "decode stepped",
)  # fmt: skip
SPAN_S = 2.0
_log = logging.getLogger(__name__)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["raw", "idle", "load", "kill"])
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"], help="of prefill and of decode")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dtype", default="auto", help="as docs/models.md has them")
    parser.add_argument("--chunk", type=int, default=1024, help="token budget of a step")
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=8.0, help="of load, for each length; of kills")
    parser.add_argument("--lanes", type=int, default=4, help="pairs at once for each side; 26 GiB of either GPU each")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    config = {"model": "Llama-8B shape, random weights", "layers": args.layers, "chunk": args.chunk}
    config |= {"dtype": args.dtype, "transfer": args.transfer}
    config |= {"devices": args.devices, "card": caps.detect().name}
    rows: list[ResultRow] = []
    for more in measured(args):
        rows += more
        _log.info("%s", write_result(args.out, "handoff-gpu", rows, config))


def measured(args: argparse.Namespace) -> Iterator[list[ResultRow]]:
    """Yield the rows part by part, so that a part that fails does not lose those before it."""
    if "raw" in args.parts:
        nodes = args.transfer not in ("auto", "nvlink")
        yield [shown(row) for row in staged(args.devices, args.transfer)] if nodes else raw(args.devices)
    if "convert" in args.parts:
        yield [shown(row) for row in staged(args.devices, "ucx", WIDE)]
    if "reshard" in args.parts:
        for sizes in ((1, 2), (2, 1), (2, 2)):
            yield [shown(row) for row in staged(args.devices, args.transfer, sizes=sizes)]
    if {"idle", "load"} & set(args.parts):
        yield measure_pair(args)
    if "kill" in args.parts:
        yield [shown(row) for row in kills(_spec(args, ""), args.devices, args.seconds, args.lanes)]


# raw


def raw(devices: Sequence[str]) -> list[ResultRow]:
    """Pull pages from a second process, and check them byte by byte."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    source = context.Process(target=_source, args=(devices[0], theirs), daemon=True)
    source.start()
    rows = []
    try:
        pool = raw_pool(devices[1])
        remote = pool.attach(ours.recv())
        for num_pages in (4, 16, 32, 128, 512):
            for checks in (False, True):
                rows.append(shown(raw_row(pool, remote, num_pages, checks)))
        remote.close()
    finally:
        source.kill()
    return rows


def _source(device: str, pipe: Any) -> None:
    pool = raw_pool(device)
    fill(pool)
    pipe.send(pool.share())
    pipe.recv()


def raw_row(pool: DeviceTransferPool, remote: Any, num_pages: int, checks: bool) -> ResultRow:
    rng = random.Random(num_pages)
    times = []
    for _ in range(20):
        pages, into = rng.sample(range(RAW_BLOCKS), num_pages), rng.sample(range(RAW_BLOCKS), num_pages)
        begin = time.perf_counter()
        remote.pull(pages, into, checks)
        times.append(time.perf_counter() - begin)
    assert holds(pool, pages, into), "a page differs"
    nbytes, median = num_pages * LAYOUT.block_nbytes, statistics.median(times[2:])
    params = {"tokens": num_pages * 64, "MiB": nbytes >> 20, "checksum": checks, "ms": round(median * 1e3, 4)}
    params["slowest_ms"] = round(max(times[2:]) * 1e3, 4)
    return ResultRow("handoff_pull", nbytes / median / 1e9, "GB/s", params, NVLINK_RATE / 1e9)


# a pair of cores


def _spec(args: argparse.Namespace, device: str) -> CoreSpec:
    return CoreSpec(
        device=device,
        num_layers=args.layers,
        dtype=args.dtype,
        max_batched_tokens=args.chunk,
        transfer=args.transfer,
    )


@contextmanager
def pair(args: argparse.Namespace, folder: Path, **changes: Any) -> Iterator[tuple[CoreHandle, CoreHandle, Answers]]:
    """Run a prefill and a decode core while the block runs; kill those that were not stopped."""
    answers = Answers()
    base = _spec(args, "")
    cores = []
    for name, device in zip(("prefill", "decode"), args.devices, strict=True):
        spec = msgspec.structs.replace(base, device=device, stamps=str(folder / f"{name}.json"), **changes)
        cores.append(CoreHandle(name, spec, answers))
    try:
        for core in cores:
            core.wait_ready()
        meet(cores[0], cores[1])
        yield cores[0], cores[1], answers
    finally:
        for core in cores:
            core.kill()


def measure_pair(args: argparse.Namespace) -> list[ResultRow]:
    rows: list[ResultRow] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gc.disable()  # collecting among all received tokens took 54 ms, in which no token was received
        began = time.perf_counter()
        with pair(args, folder) as (prefill, decode, answers):
            rows.append(shown(ResultRow("handoff_pair_start", time.perf_counter() - began, "s")))
            asked: dict[str, list[str]] = {}
            if "idle" in args.parts:
                rows += idle(prefill, decode, answers, args.repeats, asked)
            if "load" in args.parts:
                rows += loaded(prefill, decode, answers, asked, args.seconds)
            _show_links(decode)
            prefill.stop()
            decode.stop()
            stamps = read_stamps(folder)
            for what, names in asked.items():
                rows += adders(what, names, stamps)
    return rows


def idle(
    prefill: CoreHandle, decode: CoreHandle, answers: Answers, repeats: int, asked: dict[str, list[str]]
) -> list[ResultRow]:
    """Measure one request at a time: by the pair, and the same prompt by prefill's worker alone.

    They take turns at being first, because decoding on prefill's GPU leaves it warmer, and so slower, than a pair does.
    """
    rng, rows = np.random.default_rng(0), []
    for length in (128, 1024, 8192):
        equal, gaps, steps = 0, [], []
        ttft: dict[str, list[float]] = {"pair": [], "colocated": []}
        names = asked.setdefault(f"idle {length}", [])
        for turn in range(repeats + 2):
            ids = prompt(rng, length)
            asked_of = {"colocated": prefill, "pair": decode}
            name = {}
            for who in sorted(asked_of, reverse=turn % 2 == 1):
                name[who], began = ask(prefill, asked_of[who], ids, 24)
                answers.wait([name[who]], 60)
                ttft[who].append(answers.times(name[who])[0] - began)
            times = answers.times(name["pair"])
            equal += answers.ids(name["colocated"]) == answers.ids(name["pair"])
            if turn >= 2:
                names.append(name["pair"])
                gaps.append(times[1] - times[0])
                steps += np.diff(times[1:]).tolist()
        if not rows:  # the first handoff of the pair
            rows.append(shown(ResultRow("handoff_ttft_first", ttft["pair"][0] * 1e3, "ms", {"length": length})))
        params = {"length": length, "repeats": repeats}
        for who, seconds in ttft.items():
            rows.append(ResultRow(f"handoff_ttft_{who}", _ms(seconds[2:]), "ms", params))
        rows.append(ResultRow("handoff_token_gap", _ms(gaps), "ms", params | {"slowest": _worst(gaps)}))
        rows.append(ResultRow("handoff_decode_step", _ms(steps), "ms", params))
        rows.append(ResultRow("handoff_equal_answers", equal, "answers", params, limit=repeats + 2))
        for row in rows[-5:]:
            shown(row)
    return rows


def loaded(
    prefill: CoreHandle, decode: CoreHandle, answers: Answers, asked: dict[str, list[str]], seconds: float
) -> list[ResultRow]:
    """Measure handoffs while 32 answers run on decode.

    Two prompts of 8192 or 1024 tokens are always on their way through the pair. Spans with and without them alternate,
    because steps become longer as the answers do.
    """
    rng, rows = np.random.default_rng(1), []
    for length in (8192, 1024):
        batch = [ask(decode, decode, prompt(rng, 1024), 12000, 300.0)[0] for _ in range(32)]
        while any(len(answers.tokens[name]) < 8 for name in batch):
            time.sleep(0.05)
        names = asked.setdefault(f"load {length}", [])
        quiet: list[float] = []
        busy: list[float] = []
        for _ in range(max(1, round(seconds / SPAN_S))):
            with stepping(answers, batch, quiet):
                time.sleep(SPAN_S)
            with stepping(answers, batch, busy):
                names += handed_over(prefill, decode, answers, rng, length)
            answers.wait(names, 60)
        cancel(decode, batch)
        params = {"batch": 32, "length": length}
        rows.append(ResultRow("handoff_step_beside_nothing", _ms(quiet), "ms", params | {"p99": _p99(quiet)}))
        beside = params | {"handoffs": len(names), "p99": _p99(busy), "slowest": _worst(busy)}
        rows.append(ResultRow("handoff_step_beside_handoffs", _ms(busy), "ms", beside))
        gaps = [times[1] - times[0] for times in map(answers.times, names) if len(times) > 1]
        rows.append(
            ResultRow("handoff_token_gap", _ms(gaps), "ms", params | {"p99": _p99(gaps), "slowest": _worst(gaps)})
        )
        failed = [answers.ends[name] for name in names if answers.ends[name] != "finished"]
        rows.append(ResultRow("handoff_failed", len(failed), "requests", {"length": length, "first": failed[:1]}))
    for row in rows:
        shown(row)
    return rows


@contextmanager
def stepping(answers: Answers, batch: Sequence[str], steps: list[float]) -> Iterator[None]:
    """Collect the times between tokens of each request in `batch` while the block runs."""
    marks = {name: len(answers.tokens[name]) for name in batch}
    yield
    steps += [step for name in batch for step in np.diff(answers.times(name)[marks[name] :])]


def handed_over(
    prefill: CoreHandle, decode: CoreHandle, answers: Answers, rng: np.random.Generator, length: int
) -> list[str]:
    """Keep two prompts on their way for `SPAN_S`; return all requests, whose answers may still run."""
    names: list[str] = []
    waiting: list[str] = []
    end = time.perf_counter() + SPAN_S
    while time.perf_counter() < end:
        waiting = [name for name in waiting if not answers.tokens[name] and name not in answers.ends]
        while len(waiting) < 2:
            waiting.append(ask(prefill, decode, prompt(rng, length), 8)[0])
            names.append(waiting[-1])
        time.sleep(0.001)
    return names


def read_stamps(folder: Path) -> dict[tuple[str, str], float]:
    """Return ("side event", request) -> the last time of that event."""
    found = {}
    for side in ("prefill", "decode"):
        for what, request_id, at in json.loads((folder / f"{side}.json").read_text()):
            found[f"{side} {what}", request_id] = at
    return found


def adders(what: str, names: Sequence[str], stamps: dict[tuple[str, str], float]) -> list[ResultRow]:
    """Return the time of each stage after the last chunk was computed, for committed handoffs."""
    rows = []
    done = [name for name in names if ("decode adopted", name) in stamps]
    for stage in STAGES:
        times = [stamps[stage, name] - stamps["prefill computed", name] for name in done if (stage, name) in stamps]
        if not times:  # nothing is queued when the transport has no semaphores
            continue
        params = {"at": what, "handoffs": len(done), "p99": _p99(times), "slowest": _worst(times)}
        rows.append(shown(ResultRow(f"handoff_{stage.replace(' ', '_')}", _ms(times), "ms", params)))
    return rows


def _show_links(core: CoreHandle) -> None:
    for link in core.status.links if core.status else []:
        _log.info("link: %s %s %s %s", link.peer, link.transport, link.detail, link.counters)


def _ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 4) if seconds else float("nan")


def _p99(seconds: Sequence[float]) -> float:
    return round(float(np.quantile(seconds, 0.99)) * 1e3, 4) if len(seconds) else float("nan")


def _worst(seconds: Sequence[float]) -> float:
    return round(float(max(seconds, default=float("nan"))) * 1e3, 4)


if __name__ == "__main__":
    main()
