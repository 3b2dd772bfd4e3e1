"""The benchmark of the engine on one GPU or several, with random weights in a dense model's shape.

`python -m bench.engine.gpu [--out FILE] [--dtypes float8 float8-head] [--model qwen3-8b] [--stored fp8-blocks gptq]
[--tensor-parallel 2] [--prompt 8064]`

All figures go through Engine.submit and Engine.step: scheduler, block pool, input preparation, greedy sampling, and
tokens on the host. The limit of a decode step is the time to read weights, head and KV once at the bandwidth of an
H200. The limit of a prefill is its matrix products and attention at the rate that an H200 reaches with FP8 rows of one
scale each, or half of it in bf16 (bench.report.hardware_limits). Several GPUs share what is read and multiplied.
"""

import argparse
import gc
import logging
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.models.random_model import SHAPES, STORED, open_random
from bench.report.hardware_limits import FP8_ROW_RATE, READ_RATE
from bench.report.result import ResultRow, shown, write_result
from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.engine import Engine
from engine.loader import load_device_engine
from engine.messages import EngineRequest
from engine.settings import EngineSettings
from kernels import caps, catalog
from kernels.specs import AttnSpec
from kernels.timing import eager_us
from models.config import ModelConfig
from process.garbage_collector import COLLECTIONS, freeze_startup_objects

WEIGHT_NBYTES = {"gptq": (64 + 4) / 128, "awq": (64 + 4) / 128}  # codes of 128 columns, then scale and zero point
BATCHES = (1, 8, 32, 64, 128, 256)
PREFILLS = ((1, 8192), (32, 1024))  # prompts, tokens of each
PROMPT, NUM_WARM, NUM_STEPS = 992, 8, 48  # contexts around 1024
MOST_TOKENS = 4 * (NUM_WARM + NUM_STEPS)
_names = count()
_log = logging.getLogger(__name__)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--dtypes", nargs="+", default=["float8", "float8-head"])
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    parser.add_argument("--stored", nargs="+", choices=STORED, help="instead of --dtypes: as checkpoints store it")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens in the prompts of the sequences that decode")
    args = parser.parse_args()
    models = [(args.model, dtype, dtype == args.dtypes[0]) for dtype in args.dtypes]
    if args.stored:
        models = [(f"{args.model}:{stored}", "auto", True) for stored in args.stored]
    rows: list[ResultRow] = []
    for model, dtype, prefills in models:
        rows += measure(model, dtype, args.tensor_parallel, args.batches, args.prompt, prefills)
        gc.collect()
        torch.cuda.empty_cache()
    found = caps.detect()
    prefill = catalog.registry(found).resolve("attn_prefill", AttnSpec(32, 8, 128)).impl.name
    config = {
        "model": f"{args.model}'s shape, random weights",
        "tensor parallel": args.tensor_parallel,
        "card": found.name,
        "triton": found.triton,
        "prefill attention": prefill,
        "flashinfer": found.flashinfer,
    }
    write_result(args.out, "engine-gpu", rows, config)


def measure(
    model: str, dtype: str, num_gpus: int, batches: Sequence[int], prompt: int, prefills: bool
) -> list[ResultRow]:
    started = time.perf_counter()
    free, _ = torch.cuda.mem_get_info()
    engine = load(dtype, model, tensor_parallel=num_gpus, max_model_len=max(8256, prompt + MOST_TOKENS))
    dtype = model.partition(":")[2] or dtype
    rows = [shown(ResultRow("engine_start", time.perf_counter() - started, "s", {"dtype": dtype}))]
    used = engine.capacity_tokens // engine.layout.block_size * engine.layout.shard_nbytes
    left, _ = torch.cuda.mem_get_info()
    rows.append(
        shown(ResultRow("engine_kv_share_of_free", used / (used + left), "", {"dtype": dtype, "gib": free / 2**30}))
    )
    with settled(engine):
        for batch in batches:
            rows += [shown(row) for row in decode_rows(engine, dtype, num_gpus, batch, prompt)]
        if prefills:
            rows += [shown(prefill_row(engine, dtype, num_gpus, num, length)) for num, length in PREFILLS]
    return rows


def load(dtype: str, model: str = "llama-8b", **changes: Any) -> Engine:
    settings = EngineSettings(
        model=model,
        dtype=dtype,
        **{"max_num_seqs": 256, "max_batched_tokens": 8192, "max_model_len": 8256, "prefix_cache": False, **changes},
    )
    device = torch.device("cuda:0")
    checkpoint, source = open_random(model, device)
    return load_device_engine(settings, checkpoint, silent, source, device, open_random)


@contextmanager
def settled(engine: Engine) -> Iterator[None]:
    """Exempt what loading left behind from garbage collection while the block runs.

    An engine core does the same, since a full collection takes 0.2 s. After the block the engine is closed and can be
    collected.
    """
    freeze_startup_objects()
    with closing(engine):
        yield
    gc.unfreeze()


def decode_rows(engine: Engine, dtype: str, num_gpus: int, batch: int, prompt: int = PROMPT) -> list[ResultRow]:
    gc.collect()  # collecting what a profile leaves behind takes 0.08 s
    requests = random_requests(engine, [prompt] * batch, MOST_TOKENS)
    with answering(engine, requests) as num_sampled:
        collecting, stamps = COLLECTIONS.seconds, [time.perf_counter()]
        for _ in range(NUM_STEPS):
            assert len(engine.step().sampled) == batch
            stamps.append(time.perf_counter())
        collecting = COLLECTIONS.seconds - collecting
        idle = idle_share(engine) if batch in (1, 64) else None
        host = host_ms(engine)
    step_ms = (stamps[-1] - stamps[0]) / NUM_STEPS * 1e3
    context = prompt + num_sampled // batch + NUM_WARM + NUM_STEPS // 2
    params = {"dtype": dtype, "batch": batch, "context": context}
    limit = limit_ms(engine.checkpoint.config, batch, context, dtype) / num_gpus
    rows = [ResultRow("engine_decode_step", step_ms, "ms", params, limit)]
    slowest = max(late - early for early, late in pairwise(stamps)) * 1e3
    rows.append(ResultRow("engine_decode_step_slowest", slowest, "ms", params))
    rows.append(ResultRow("engine_collector", collecting * 1e3, "ms", params))
    if num_gpus == 1:  # one process cannot replay the graphs of several GPUs
        held = engine.runner.launcher.steps.held(batch, context)  # type: ignore[attr-defined]
        alone = eager_us(held, count=10, groups=5) / 1e3
        rows.append(ResultRow("engine_graph_replay", alone, "ms", params, limit))
    rows.append(ResultRow("engine_host_work", host, "ms", params))
    if idle is not None:
        rows.append(ResultRow("engine_gpu_idle", idle, "", params))
    return rows


@contextmanager
def answering(engine: Engine, requests: Sequence[EngineRequest]) -> Iterator[int]:
    """Keep all requests being answered while the block runs, after `NUM_WARM` decode steps.

    Yields how many tokens they had in all before those steps.
    """
    for request in requests:
        engine.submit(request)
    sampled: Counter[str] = Counter()
    while len(sampled) < len(requests):  # a few prompts are computed at a time, so the first answers are ahead
        sampled.update(told.request_id for told in engine.step().sampled)
    for _ in range(NUM_WARM):
        engine.step()
    yield sampled.total()
    for request in requests:
        engine.release(request.request_id)
    while engine.has_work():
        engine.step()


def host_ms(engine: Engine, num_steps: int = 16) -> float:
    """Return the milliseconds that the host works in a step, not counting its waits for tokens."""
    waits: list[float] = []
    wait = torch.cuda.Event.synchronize

    def timed(event: torch.cuda.Event) -> None:
        begin = time.perf_counter()
        wait(event)
        waits.append(time.perf_counter() - begin)

    torch.cuda.Event.synchronize = timed  # type: ignore[method-assign]
    try:
        begin = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        whole = time.perf_counter() - begin
    finally:
        torch.cuda.Event.synchronize = wait  # type: ignore[method-assign]
    return (whole - sum(waits)) / num_steps * 1e3


def idle_share(engine: Engine, num_steps: int = 12) -> float:
    """Return the share of time, between its first and last activity in some steps, that the GPU is idle."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:  # else it warns of a second cycle
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if "CUDA" in str(event.device_type)
    )
    busy, edge = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, edge))
        edge = max(edge, end)
    return 1 - busy / (edge - spans[0][0])


def prefill_rate(engine: Engine, num: int, length: int, num_runs: int) -> float:
    """Return the median tokens per second of all runs but the first.

    A run lasts from submitting the prompts until their first tokens are on the host.
    """
    rates = []
    for _ in range(num_runs):
        prompts = random_requests(engine, [length] * num, 1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for request in prompts:
            engine.submit(request)
        while engine.has_work():
            engine.step()
        rates.append(num * length / (time.perf_counter() - begin))
    return statistics.median(rates[1:])


def prefill_row(engine: Engine, dtype: str, num_gpus: int, num: int, length: int) -> ResultRow:
    rate = prefill_rate(engine, num, length, 6)
    rate_of_products = FP8_ROW_RATE if is_fp8(dtype) else FP8_ROW_RATE / 2
    limit = num_gpus * rate_of_products / flops_per_token(engine.checkpoint.config, length)
    params = {"dtype": dtype, "prompts": num, "length": length}
    return ResultRow("engine_prefill", rate, "tokens/s", params, limit)


def submit(engine: Engine, lengths: Sequence[int], max_tokens: int) -> list[RequestId]:
    made = random_requests(engine, lengths, max_tokens)
    for request in made:
        engine.submit(request)
    return [request.request_id for request in made]


def random_requests(engine: Engine, lengths: Sequence[int], max_tokens: int) -> list[EngineRequest]:
    """Return requests with random prompts of these lengths.

    They are made before the clock starts, because drawing 8192 token ids as a list is not the engine's work.
    """
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
    vocab = engine.checkpoint.config.vocab_size
    return [
        EngineRequest(RequestId(str(next(_names))), rng.integers(0, vocab, length).tolist(), sampling)
        for length in lengths
    ]


def layer_weights(config: ModelConfig) -> int:
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return config.hidden_size * (width + config.num_heads * config.head_dim + 3 * config.intermediate_size)


def limit_ms(config: ModelConfig, batch: int, context: int, dtype: str) -> float:
    weights = config.num_layers * layer_weights(config)
    cache = config.num_layers * 2 * config.num_kv_heads * config.head_dim * context * batch
    head = (1 if dtype == "float8-head" else 2) * config.vocab_size * config.hidden_size
    plain = 1 if is_fp8(dtype) else 2
    return (WEIGHT_NBYTES.get(dtype, plain) * weights + plain * cache + head) / READ_RATE * 1e3


def is_fp8(dtype: str) -> bool:
    """Return whether numbers take one byte; otherwise they are bf16, with products at half the rate."""
    return dtype.startswith(("float8", "fp8"))


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Return the mean FLOPs per token of a causal prompt, whose attention covers half of it on average."""
    attention = 4 * config.num_heads * config.head_dim * length / 2
    return config.num_layers * (2 * layer_weights(config) + attention)


def silent(stage: str, done: int, total: int) -> None:
    """Ignore the progress of loading."""


if __name__ == "__main__":
    main()
