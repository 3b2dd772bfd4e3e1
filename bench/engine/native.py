"""The benchmark of the native CPU path beside torch's path and llama.cpp, which take turns in one run.

`python -m bench.engine.native [--llama PYTHON] [--rounds 5] [--torch-dtype mixed4] [--out FILE]`

All three compute the same GGUF file with as many threads. `--llama` is the Python of an environment that has
llama-cpp-python; its process sleeps while another is measured. Our figures go through Engine.submit and Engine.step,
sampling included. The limit of decode is the time to read every weight once, at the rate of the same run.
"""

import argparse
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from bench.engine.cpu import NUM_DECODED, NUM_PROMPT, NUM_STREAMS, decode, medians_in_turns, prefill, read_bandwidth
from bench.engine.llama_cpp_process import LlamaCppProcess
from bench.report.result import ResultRow, write_result
from engine.engine import Engine
from engine.loader import load_engine
from engine.settings import EngineSettings
from kernels.cpu.isa import apply_isa, probe_isa
from kernels.cpu.native import load_kernels

_PROMPT = 64
_log = logging.getLogger(__name__)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = _arguments()
    base = EngineSettings(model=args.model, prefix_cache=False, num_threads=args.threads)
    apply_isa(probe_isa(base.cache_dir))
    native = load_engine(replace(base, dtype="native"))
    engines = {"native": native, "torch": load_engine(replace(base, dtype=args.torch_dtype))}
    threads = torch.get_num_threads()
    peer = LlamaCppProcess(args.llama, native.checkpoint.path, threads, NUM_STREAMS) if args.llama else None
    rates = measure(engines, peer, args.rounds)
    config = {
        "model": native.checkpoint.name,
        "threads": threads,
        "rounds": args.rounds,
        "instructions": load_kernels().best_level,
        "torch dtype": engines["torch"].dtype,
        "llama-cpp-python": peer.version if peer else None,
    }
    rows = result_rows(rates, native.checkpoint.path.stat().st_size, f"torch, {engines['torch'].dtype}")
    if peer:
        peer.close()
    _log.info("%s", write_result(args.out, "native", rows, config).with_suffix(".md").read_text(encoding="utf-8"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a GGUF file; the default model if empty")
    parser.add_argument("--llama", type=Path, default=None, help="the Python of an environment with llama-cpp-python")
    parser.add_argument("--torch-dtype", default="mixed4", help="the number format of torch's path")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def measure(engines: dict[str, Engine], peer: LlamaCppProcess | None, rounds: int) -> dict[str, float]:
    """Return medians in turns: tokens/s, and bytes/s for `read`."""
    runs: dict[str, Callable[[], float]] = {"read": read_bandwidth}
    for streams in (1, NUM_STREAMS):
        for name, engine in engines.items():
            runs[f"{name} decode {streams}"] = lambda engine=engine, streams=streams: decode(engine, streams)
        if peer:
            runs[f"llama.cpp decode {streams}"] = lambda streams=streams: peer.decode(streams, _PROMPT, NUM_DECODED)
    for name, engine in engines.items():
        runs[f"{name} prefill"] = lambda engine=engine: prefill(engine)
    if peer:
        runs["llama.cpp prefill"] = lambda: peer.prefill(NUM_PROMPT)
    return medians_in_turns(runs, rounds)


def result_rows(rates: dict[str, float], file_nbytes: int, torch_name: str) -> list[ResultRow]:
    """Return each of our figures beside each peer's."""
    limit = rates["read"] / file_nbytes
    peers = [("torch", torch_name)] + ([("llama.cpp", "llama.cpp")] if "llama.cpp prefill" in rates else [])
    rows = []
    for streams in (1, NUM_STREAMS):
        name, params = f"decode {streams}", {"prompt": _PROMPT, "answer": NUM_DECODED, "streams": streams}
        what = "decode, 1 stream" if streams == 1 else f"decode, {streams} streams"
        rows += [
            ResultRow(
                what, rates[f"native {name}"], "tokens/s", params, limit * streams, words, rates[f"{peer} {name}"]
            )
            for peer, words in peers
        ]
    rows += [
        ResultRow(
            "prefill",
            rates["native prefill"],
            "tokens/s",
            {"prompt": NUM_PROMPT},
            None,
            words,
            rates[f"{peer} prefill"],
        )
        for peer, words in peers
    ]
    return [*rows, ResultRow("memory read", rates["read"] / 1e9, "GB/s")]


if __name__ == "__main__":
    main()
