"""The benchmark of serving on two GPUs, end to end over HTTP: a pair beside two plain replicas.

    python -m bench.models.model_folder /dev/shm/llama-8b --device cuda
    python -m bench.serving.gpu --model /dev/shm/llama-8b --out bench/results/FILE.json

    pair       a prefill and a decode worker, connected by NVLink
    replicas   two workers that do both, without handoffs: what a pair has to beat on the same GPUs
    shared     a prefill worker, and one that decodes and takes prompts when the other has too many
    pair-ucx   the pair with UCX

The systems run one after the other. Kernels are compiled for the first system that is started, and are there for the
others. The result file is written after each load. `--device cpu --shrink 32` tries it all out without a GPU.

    python -m bench.serving.gpu --model /dev/shm/llama-8b --url vllm=http://127.0.0.1:8000,http://127.0.0.1:8001

puts the same loads on servers that already run and speak OpenAI's API, each by a name of yours; several addresses are
replicas, which take requests in turn. For them there are no rows of starts, memory and the services' own metrics. For a
server that keeps prompts in a prefix cache, take another `--seed` each time. See bench/README.md, "Comparison with
vLLM".
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.load.client import VOCABULARY, session
from bench.load.generator import Measured, TargetServer, measure
from bench.load.servers import Found, Named, found_at, named
from bench.report.result import ResultRow, write_result
from bench.serving.loads import GAP_S, LOADS, Load, load_rows
from bench.serving.plots import Drawn, plot_serving
from bench.serving.soak import wait_clean
from bench.system.local_system import System, running
from bench.system.resource_usage import SystemCounters, gpu_names, memory_rows, start_rows
from contracts.errors import Unavailable

SYSTEMS = {
    "pair": ("--prefill", "1", "--decode", "1"),
    "replicas": ("--prefill", "0", "--decode", "0", "--mixed", "2"),
    "shared": ("--prefill", "1", "--decode", "0", "--mixed", "1"),
    "pair-ucx": ("--prefill", "1", "--decode", "1"),
}
QUIET_S = 30.0


class Report:
    """All rows so far, written after each load, so that a run that is cut short has them."""

    def __init__(self, args: argparse.Namespace, loads: Sequence[Load]) -> None:
        self._args, self._loads = args, loads
        self.rows: list[ResultRow] = []
        self.drawn: Drawn = {}
        self.found: dict[str, Found] = {}

    def add(self, rows: Sequence[ResultRow], **params: str) -> None:
        self.rows += [replace(row, params=params | dict(row.params)) for row in rows]
        args = self._args
        config = {name: getattr(args, name) for name in ("model", "device", "dtype", "shrink", "seed", "systems")}
        config |= {
            "gpus": gpu_names(),
            "points": {load.name: f"{load.point}, {load.point.num_requests} requests" for load in self._loads},
            "objective": {load.name: f"TTFT {load.ttft_s} s, mean gap {GAP_S} s" for load in self._loads},
        }
        if self.found:
            config["servers"] = {name: asdict(found) for name, found in self.found.items()}
        self.file = write_result(args.out, "serving-gpu", self.rows, config)

    def draw(self) -> None:
        for file in plot_serving(self.file, self._loads, self.drawn):
            print(file)


def main() -> int:
    args = parse()
    loads = [load.shrunk(args.shrink) for load in LOADS if load.name in args.loads]
    report, failed = Report(args, loads), []
    with TemporaryDirectory(prefix="tandem-kernels-") as kernels:
        for name, measuring in measurements(args, loads, report, kernels):
            try:
                asyncio.run(measuring)
            except (RuntimeError, Unavailable, OSError) as error:
                print(f"{name}: {error}", file=sys.stderr)
                failed.append(name)
            if report.drawn:
                report.draw()
    return 1 if failed else 0


def measurements(
    args: argparse.Namespace, loads: Sequence[Load], report: Report, kernels: str
) -> Iterator[tuple[str, Coroutine]]:
    for one in args.url:
        yield one.name, measure_server(one, args, loads, report)
    for name in args.systems:
        yield name, measure_system(name, args, loads, report, kernels)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [load.name for load in LOADS]
    parser.add_argument("--model", required=True, help="a folder as bench.models.model_folder writes it")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="pair and replicas; with --url none")
    words = "a server that runs, or replicas; may be given again"
    parser.add_argument("--url", action="append", type=named, default=[], metavar="NAME=URL[,URL...]", help=words)
    words = "what the servers of --url call the model; else what they list first"
    parser.add_argument("--served-name", default="", metavar="NAME", help=words)
    parser.add_argument("--loads", nargs="+", default=names, choices=names)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--shrink", type=int, default=1, metavar="N", help="lengths and requests by N: to try it out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="result file; the plots go beside it")
    args = parser.parse_args()
    if args.systems is None:
        args.systems = [] if args.url else ["pair", "replicas"]
    names = [*args.systems, *(one.name for one in args.url)]
    if len(set(names)) < len(names):
        parser.error(f"two systems have one name: {', '.join(names)}")
    return args


async def measure_system(
    name: str, args: argparse.Namespace, loads: Sequence[Load], report: Report, kernels: str
) -> None:
    common = ("--model", args.model, "--device", args.device, "--dtype", args.dtype)
    began_s = time.perf_counter()
    with running(*SYSTEMS[name], "--transfer", transfer_of(name, args.device), *common, TRITON_CACHE_DIR=kernels) as up:
        rows = [*start_rows(up, time.perf_counter() - began_s), *memory_rows(up)]
        report.add([shown(row) for row in rows], system=name)
        accounts = SystemCounters(up)
        server = TargetServer(up.url, up.model(), vocabulary_of(args.model), QUIET_S)
        for load in loads:
            measured = await drive(server, load, args.seed)
            report.drawn.setdefault(load.name, {})[name] = measured.good
            rows = load_rows(name, load, measured)
            report.add([shown(row) for row in rows + accounts.rows(measured.wall_s)], system=name, load=load.name)
        report.add([shown(row) for row in after_rows(up)], system=name)


def transfer_of(name: str, device: str) -> str:
    if name == "pair-ucx":
        return "ucx"
    return "nvlink" if device.startswith("cuda") else "auto"


async def measure_server(one: Named, args: argparse.Namespace, loads: Sequence[Load], report: Report) -> None:
    async with session(total_s=None) as http:
        found = report.found[one.name] = await found_at(http, one.urls, args.served_name)
    server = found.server(vocabulary_of(args.model), QUIET_S)
    for load in loads:
        measured = await drive(server, load, args.seed)
        report.drawn.setdefault(load.name, {})[one.name] = measured.good
        rows = load_rows(one.name, load, measured, num_gpus=0)
        report.add([shown(row) for row in rows], system=one.name, load=load.name)


def vocabulary_of(folder: str) -> int:
    """Return the bound of the token ids in prompts."""
    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    return min(VOCABULARY, config["vocab_size"])


async def drive(server: TargetServer, load: Load, seed: int) -> Measured:
    measured = Measured(load.point)
    async with session(total_s=None) as http:
        await measure(http, server, measured, seed, lambda answer: None)
    return measured


def after_rows(system: System) -> list[ResultRow]:
    """Return whether every page came back."""
    return [ResultRow("pool clean afterwards", int(is_clean), "bool", {"worker": worker})
            for worker, is_clean in wait_clean(system).items()]  # fmt: skip


def shown(row: ResultRow) -> ResultRow:
    """Print a row at once, and return it."""
    peer = f"   {row.peer} {row.peer_value:.4g}" if row.peer_value else ""
    print(f"{row.name:24s} {row.value:10.3f} {row.unit:16s} {dict(row.params)}{peer}", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
