"""The benchmark of a worker's start and memory on the CPU, the native path beside torch's, in turns.

`python -m bench.engine.start [--model FILE | --random] [--rounds 3] [--torch-dtype NAME] [--out FILE]`

Two workers' engines are loaded in processes of their own, as `tandem up` has a pair. A first round, which is not
counted, fills the page cache and packs what is kept packed, so all figures are warm. A worker's share is its PSS while
both are there: pages that both map count half. `--random` takes a Qwen2.5-0.5B in Q4_K_M with random weights, beside
which torch computes in float16; the default model's Q4_1 it computes in `mixed4`.
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from bench.models.random_gguf import write_q4_k_m
from bench.report.result import ResultRow, write_result

Facts = dict[str, float]
NATIVE = "native"
_NUM_WORKERS = 2
_MIB = 1 << 20
_log = logging.getLogger(__name__)


class LoadedWorker:
    """One child, from its start to its end."""

    def __init__(self, dtype: str, model: str) -> None:
        command = [sys.executable, "-m", "bench.engine.start_worker", dtype, model]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=60)  # closes its input, which ends it
        finally:
            self._process.kill()

    def answer(self) -> Facts:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self._process.wait()} before it was ready")
        return json.loads(line)

    def memory(self) -> Facts:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.answer()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        name = "Qwen2.5-0.5B Q4_K_M, random weights" if args.random else args.model or "default"
        model = str(write_q4_k_m(Path(folder) / "random.gguf")) if args.random else args.model
        torch_dtype = args.torch_dtype or ("float16" if args.random else "mixed4")
        found = measure(model, (NATIVE, torch_dtype), args.rounds)
    config = {"model": name, "rounds": args.rounds, "workers": _NUM_WORKERS, "torch dtype": torch_dtype}
    file = write_result(args.out, "start", result_rows(found, torch_dtype), config)
    _log.info("%s", file.with_suffix(".md").read_text(encoding="utf-8"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--model", default="", help="a GGUF file; the default model if empty")
    models.add_argument("--random", action="store_true", help="a Qwen2.5-0.5B in Q4_K_M with random weights")
    parser.add_argument("--torch-dtype", default=None, help="the number format of torch's path")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def measure(model: str, dtypes: tuple[str, str], rounds: int) -> dict[str, Facts]:
    """Return the median facts of one worker of each format: seconds, and bytes while two of it are there."""
    seen: dict[str, list[Facts]] = {dtype: [] for dtype in dtypes}
    for index in range(rounds + 1):
        for dtype in dtypes:
            facts = _round(dtype, model)
            _log.info("round %d %s %s", index, dtype, facts)
            if index:
                seen[dtype] += facts
    return {dtype: _medians(facts) for dtype, facts in seen.items()}


def _round(dtype: str, model: str) -> list[Facts]:
    """One alone, for its time, beside which a second one is loaded, for the memory of both."""
    with ExitStack() as stack:
        workers, facts = [], []
        for _ in range(_NUM_WORKERS):
            workers.append(stack.enter_context(LoadedWorker(dtype, model)))
            facts.append(workers[-1].answer())
        return [known | worker.memory() for known, worker in zip(facts, workers, strict=True)]


def _medians(facts: list[Facts]) -> Facts:
    return {name: statistics.median(each[name] for each in facts) for name in facts[0]}


def result_rows(found: dict[str, Facts], torch_dtype: str) -> list[ResultRow]:
    """Return each figure of the native path beside torch's."""
    native, torch = found[NATIVE], found[torch_dtype]
    params = {"file MiB": round(native["file_nbytes"] / _MIB), "KV MiB": round(native["kv_nbytes"] / _MIB)}
    names = {
        "load_s": ("load to ready, warm", "s", 1),
        "import_s": ("imports of a worker", "s", 1),
        "cpu_s": ("CPU time from process to ready", "s", 1),
        "rss": ("resident memory of a worker", "MiB", _MIB),
        "pss": ("its share, two of them", "MiB", _MIB),
        "own": ("its own alone", "MiB", _MIB),
    }
    return [
        ResultRow(words, native[name] / scale, unit, params, None, f"torch, {torch_dtype}", torch[name] / scale)
        for name, (words, unit, scale) in names.items()
    ]


if __name__ == "__main__":
    main()
