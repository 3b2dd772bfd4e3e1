"""The benchmark of the engine on a CPU beside transformers, interleaved in one run.

`python -m bench.engine.cpu [--dtype auto] [--rounds 5] [--out FILE]`

Our figures go through Engine.submit and Engine.step, sampling included. The peer is transformers in bfloat16 on the
same weights, with oneDNN restricted to instruction sets with which its bfloat16 does not crash. The limit of decode is
the time to read every weight once.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from bench.models.transformers_oracle import oracle
from bench.report.result import ResultRow, write_result
from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.cpu.linear import (
    FORMATS,
    BFloat16Linear,
    Float16Linear,
    Float32Linear,
    Int4Linear,
    Int8Linear,
    Pack,
    pack_int4_if_exact,
)
from engine.cpu.native.choice import NATIVE
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import EngineRequest
from engine.settings import EngineSettings
from kernels.cpu.isa import apply_isa, probe_isa

NUM_DECODED, NUM_STREAMS, NUM_PROMPT = 48, 16, 1024
_PEER = "transformers bfloat16, one stream"
_NBYTES_READ = 270 << 20
# Bytes per weight. Each group of int4 weights also has a scale and an offset in bfloat16.
_NBYTES: dict[Pack, float] = {
    Float32Linear: 4,
    Float16Linear: 2,
    BFloat16Linear: 2,
    Int8Linear: 1,
    pack_int4_if_exact: 0.5 + 4 / Int4Linear.GROUP,
}
_names = count()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = _arguments()
    settings = EngineSettings(model=args.model, dtype=args.dtype, prefix_cache=False, num_threads=args.threads)
    apply_isa(probe_isa(settings.cache_dir))
    engine = load_engine(settings)
    peer = oracle(engine.checkpoint, torch.bfloat16)
    rates = measure(engine, peer, args.rounds)
    rows = _rows(rates, weight_nbytes(engine))
    config = {
        "model": engine.checkpoint.name,
        "dtype": engine.dtype,
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
    }
    logging.info("%s", write_result(args.out, "engine", rows, config).with_suffix(".md").read_text(encoding="utf-8"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder, GGUF file or hub id; the default model if empty")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def measure(engine: Engine, peer: PreTrainedModel, rounds: int) -> dict[str, float]:
    """Return medians in turns: tokens/s, and bytes/s for `read`."""
    runs: dict[str, Callable[[], float]] = {
        "peer decode": lambda: peer_decode(peer),
        "decode": lambda: decode(engine, 1),
        "peer prefill": lambda: peer_prefill(peer),
        "prefill": lambda: prefill(engine),
        "streams": lambda: decode(engine, NUM_STREAMS),
        "read": read_bandwidth,
    }
    return medians_in_turns(runs, rounds)


def medians_in_turns(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median of each over rounds in which all take turns, after a round to warm up."""
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        for name, run in runs.items():
            rate = run()
            if index:
                seen[name].append(rate)
                logging.info("round %d %s %.4g", index, name, rate)
    return {name: statistics.median(values) for name, values in seen.items()}


def decode(engine: Engine, num_streams: int) -> float:
    """Return the tokens per second of `num_streams` answers at a time, each after a prompt of 64 tokens."""
    submit(engine, [64] * num_streams, NUM_DECODED + 1)
    while engine.stats().num_waiting or engine.stats().queue_tokens > num_streams:
        engine.step()
    return _rate(engine, lambda output: output.num_decode_tokens)


def prefill(engine: Engine) -> float:
    submit(engine, [NUM_PROMPT], 1)
    return _rate(engine, lambda output: output.num_prefill_tokens)


def submit(engine: Engine, lengths: Sequence[int], max_tokens: int) -> None:
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
    for length in lengths:
        token_ids = rng.integers(0, engine.checkpoint.config.vocab_size, length).tolist()
        engine.submit(EngineRequest(RequestId(str(next(_names))), token_ids, sampling))


def _rate(engine: Engine, tokens: Callable) -> float:
    num_tokens, start = 0, time.perf_counter()
    while engine.has_work():
        num_tokens += tokens(engine.step())
    return num_tokens / (time.perf_counter() - start)


@torch.inference_mode()
def peer_decode(model: PreTrainedModel) -> float:
    step = model(_random_ids(model, 64), use_cache=True, logits_to_keep=1)
    start = time.perf_counter()
    for _ in range(NUM_DECODED):
        token = step.logits[:, -1].argmax(-1, keepdim=True)
        step = model(token, past_key_values=step.past_key_values, use_cache=True, logits_to_keep=1)
    return NUM_DECODED / (time.perf_counter() - start)


@torch.inference_mode()
def peer_prefill(model: PreTrainedModel) -> float:
    token_ids = _random_ids(model, NUM_PROMPT)
    start = time.perf_counter()
    model(token_ids, use_cache=True, logits_to_keep=1)
    return NUM_PROMPT / (time.perf_counter() - start)


def _random_ids(model: PreTrainedModel, count: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))


def read_bandwidth() -> float:
    """Return the bytes per second at which about as many bytes as a decode step reads are summed."""
    data = torch.ones(_NBYTES_READ // 4)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return _NBYTES_READ / min(times)


def weight_nbytes(engine: Engine) -> int:
    """Return the bytes of weights that one decode step reads.

    Each matrix is read once in the format that decode uses, and the embedding table only as the output head. For int4
    all matrices are assumed to be quantized, which holds for the default model. On the native path it is the file.
    """
    if engine.dtype == NATIVE:
        return engine.checkpoint.path.stat().st_size
    config, number_format = engine.checkpoint.config, FORMATS[engine.dtype]
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (width + config.num_heads * config.head_dim + 3 * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    return round(_NBYTES[number_format.answer] * config.num_layers * layer + _NBYTES[number_format.head] * head)


def _rows(rates: dict[str, float], nbytes: int) -> list[ResultRow]:
    limit = rates["read"] / nbytes
    single = {"prompt": 64, "answer": NUM_DECODED}
    return [
        ResultRow("decode, 1 stream", rates["decode"], "tokens/s", single, limit, _PEER, rates["peer decode"]),
        ResultRow(
            "decode, 16 streams", rates["streams"], "tokens/s", single, limit * NUM_STREAMS, _PEER, rates["peer decode"]
        ),
        ResultRow("prefill", rates["prefill"], "tokens/s", {"prompt": NUM_PROMPT}, None, _PEER, rates["peer prefill"]),
        ResultRow("memory read", rates["read"] / 1e9, "GB/s", {"MiB": _NBYTES_READ >> 20}),
    ]


if __name__ == "__main__":
    main()
