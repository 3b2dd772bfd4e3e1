"""The benchmark of mixtures of experts on a GPU.

`python -m bench.engine.moe [--out FILE] [--layers N]`

First a small model with random weights: its tokens and log-probabilities beside those of the CPU engine in float32.
Then the shapes of Qwen3-30B-A3B, gpt-oss-20B and Llama 4 Maverick, cut to a few layers, with the whole head. Decode
stands beside the time to read once what a step touches, with experts chosen at random, and prefill beside its FLOPs at
the rate of FP8 products. Contexts have about 1016 tokens and prompts 1024, so Llama 4's attention in segments of 8192
plays no part.
"""

import argparse
import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.engine.gpu import prefill_rate, settled, submit
from bench.models.random_model import GPT_OSS_20B, LLAMA4_MAVERICK, QWEN3_30B_A3B, RandomWeights, random_checkpoint
from bench.report.hardware_limits import FP8_ROW_RATE, READ_RATE
from bench.report.result import ResultRow, shown, write_result
from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.backend import Backend
from engine.cache.sizing import kv_layout
from engine.cpu.decoder import Decoder
from engine.cpu.grouped_cache import GroupedKVCache
from engine.cpu.linear import FORMATS
from engine.cpu.runner import CpuRunner
from engine.cpu.weight_loader import load_weights
from engine.engine import Engine
from engine.loader import load_device_engine
from engine.messages import EngineRequest
from engine.model_loader.checkpoint_weights import TensorSlice
from engine.sampling.host_sampler import Sampler
from engine.settings import EngineSettings
from kernels import caps
from models.config import Experts, ModelConfig

SMALL = replace(
    QWEN3_30B_A3B, vocab_size=8192, hidden_size=576, num_layers=12, num_heads=9, num_kv_heads=3, head_dim=64,
    max_model_len=2048, experts=Experts(32, 4, 384, renormalize=True),
)  # fmt: skip
LENGTHS, NUM_TOKENS = (5, 64, 100, 300), 32
MODELS = {"qwen3-30b-a3b": QWEN3_30B_A3B, "gpt-oss-20b": GPT_OSS_20B, "llama4-maverick": LLAMA4_MAVERICK}
SHAPES = (
    ("qwen3-30b-a3b", "float8"),
    ("gpt-oss-20b", "float8"),
    ("qwen3-30b-a3b", "bfloat16"),
    ("llama4-maverick", "float8"),
)
BATCHES = (1, 8, 32, 64)
PROMPT, NUM_WARM, NUM_STEPS = 992, 8, 32
PREFILL = (8, 1024)
_log = logging.getLogger(__name__)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    rows = agreement_rows(torch.device("cuda"))
    for name, dtype in SHAPES:
        config = replace(MODELS[name], num_layers=args.layers, max_model_len=2048)
        rows += speed_rows(name, config, dtype)
        gc.collect()
        torch.cuda.empty_cache()
    config = {"model": f"random weights, {args.layers} layers", "card": caps.detect().name}
    write_result(args.out, "engine-gpu-experts", rows, config)


class KeptWeights:
    """The random weights of a model, which stay the same when they are read again."""

    interleaved, quantized = False, None

    def __init__(self, config: ModelConfig) -> None:
        self._source = RandomWeights(config, torch.device("cpu"))
        self._kept: dict[str, torch.Tensor] = {}

    def tensor(self, name: str, cut: TensorSlice | None = None) -> torch.Tensor:
        if name not in self._kept:
            self._kept[name] = self._source.tensor(name) * (3 if name.endswith("proj.weight") else 1)
        return self._kept[name] if cut is None else cut.of(self._kept[name])


def agreement_rows(device: torch.device, config: ModelConfig = SMALL) -> list[ResultRow]:
    """Compare each number format on the GPU with the CPU's float32.

    The rows have the share of tokens before the first difference, and the distance of the log-probabilities of the
    prompts' own tokens.
    """
    source = KeptWeights(config)
    settings = EngineSettings(dtype="float32", kv_cache_nbytes=256 << 20, max_num_seqs=8, max_batched_tokens=512)
    tokens, logprobs = told(cpu_engine(settings, config, source))
    rows = []
    for dtype in ("float32", "bfloat16", "float8"):
        changed = replace(settings, dtype=dtype, prefix_cache=False)
        found = told(load_device_engine(changed, random_checkpoint("small", config), lambda *_: None, source, device))
        alike = sum(agreed(a, b) for a, b in zip(tokens, found[0], strict=True)) / (len(tokens) * NUM_TOKENS)
        away = np.abs(np.array(found[1]) - np.array(logprobs))
        params = {"dtype": dtype}
        rows.append(shown(ResultRow("experts_tokens_alike", alike, "", params)))
        rows.append(shown(ResultRow("experts_logprob_distance_max", float(away.max()), "", params)))
        rows.append(shown(ResultRow("experts_logprob_distance_mean", float(away.mean()), "", params)))
    return rows


def cpu_engine(settings: EngineSettings, config: ModelConfig, source: KeptWeights) -> Engine:
    checkpoint, made = random_checkpoint("small", config), FORMATS[settings.dtype]
    layout = kv_layout(checkpoint, settings.block_size, made.kv_dtype, settings.dtype)
    cache = GroupedKVCache(layout, (settings.kv_cache_nbytes or 0) // layout.block_nbytes)
    model = Decoder(config, load_weights(config, source, made, lambda *_: None), config.max_model_len)
    backend = Backend(cache, CpuRunner(model, cache), Sampler(()), settings.dtype, config.max_model_len, True)
    return Engine(settings, checkpoint, backend)


def told(engine: Engine) -> tuple[list[list[int]], list[float]]:
    """Return greedy answers to random prompts, and the log-probabilities of the prompts' own tokens."""
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[float]] = {}
    for length in LENGTHS:
        name = str(length)
        tokens[name], logprobs[name] = [], []
        prompt = rng.integers(0, engine.checkpoint.config.vocab_size, length).tolist()
        engine.submit(EngineRequest(RequestId(name), prompt, sampling))
    while engine.has_work():
        output = engine.step()
        for sampled in output.sampled:
            tokens[sampled.request_id].append(sampled.token.token_id)
        for scored in output.scored:
            logprobs[scored.request_id] += [token.logprob for token in scored.tokens]
    return list(tokens.values()), [value for values in logprobs.values() for value in values]


def agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens precede the first difference."""
    return next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))


def speed_rows(name: str, config: ModelConfig, dtype: str) -> list[ResultRow]:
    settings = EngineSettings(dtype=dtype, max_num_seqs=max(BATCHES), max_batched_tokens=8192, prefix_cache=False)
    device, begin = torch.device("cuda"), time.perf_counter()
    checkpoint = random_checkpoint("experts-random", config)
    engine = load_device_engine(settings, checkpoint, lambda *_: None, RandomWeights(config, device), device)
    params = {"model": name, "dtype": dtype}
    rows = [shown(ResultRow("experts_start", time.perf_counter() - begin, "s", params))]
    with settled(engine):
        rows += [shown(decode_row(engine, params, batch)) for batch in BATCHES]
        return [*rows, shown(prefill_row(engine, params))]


def decode_row(engine: Engine, about: dict[str, str], batch: int) -> ResultRow:
    names = submit(engine, [PROMPT] * batch, 4 * (NUM_WARM + NUM_STEPS))
    num_sampled = 0
    while num_sampled < batch:
        num_sampled += len(engine.step().sampled)
    for _ in range(NUM_WARM):
        engine.step()
    begin = time.perf_counter()
    for _ in range(NUM_STEPS):
        engine.step()
    step_ms = (time.perf_counter() - begin) / NUM_STEPS * 1e3
    for name in names:
        engine.release(name)
    while engine.has_work():
        engine.step()
    context = PROMPT + NUM_WARM + NUM_STEPS // 2
    limit = limit_ms(engine.checkpoint.config, batch, context, 1 if about["dtype"] == "float8" else 2)
    return ResultRow("experts_decode_step", step_ms, "ms", {**about, "batch": batch, "context": context}, limit)


def prefill_row(engine: Engine, about: dict[str, str]) -> ResultRow:
    num, length = PREFILL
    rate = prefill_rate(engine, num, length, 4)
    limit = FP8_ROW_RATE / (1 if about["dtype"] == "float8" else 2) / flops_per_token(engine.checkpoint.config, length)
    params = {**about, "prompts": num, "length": length}
    return ResultRow("experts_prefill", rate, "tokens/s", params, limit)


def limit_ms(config: ModelConfig, batch: int, context: int, nbytes: int) -> float:
    """Return the milliseconds that reading what one decode step touches takes.

    `nbytes` is the size of a weight and of a number in the KV cache. Router and head are bf16; MXFP4 takes 17 bytes for
    32 weights.
    """
    experts = experts_of(config)
    touched = experts.count * (1 - (1 - experts.top_k / experts.count) ** batch)
    chosen = (17 / 32 if experts.is_mxfp4 else nbytes) * touched * expert_weights(config)
    router, head = 2 * experts.count * config.hidden_size, 2 * config.vocab_size * config.hidden_size
    weights = nbytes * always_multiplied(config) + num_mixed(config) * (chosen + router)
    cache = nbytes * 2 * config.num_kv_heads * config.head_dim * batch * tokens_seen(config, context)
    return (weights + cache + head) / READ_RATE * 1e3


def tokens_seen(config: ModelConfig, context: int) -> int:
    """Return how many tokens the newest token attends to, summed over all layers."""
    windowed = sum(layer in config.windowed_layers for layer in range(config.num_layers))
    seen = min(context, (context - 1) % config.segment + 1 if config.segment else config.window)
    return (config.num_layers - windowed) * context + windowed * seen


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Return the mean FLOPs per token of a causal prompt.

    They are the products of the chosen experts, and attention over half of the prompt on average, or over the window.
    """
    experts = experts_of(config)
    mixed = experts.top_k * expert_weights(config) + experts.count * config.hidden_size
    products = always_multiplied(config) + num_mixed(config) * mixed
    attention = 4 * config.num_heads * config.head_dim * tokens_seen(config, length // 2)
    return 2 * products + attention


def always_multiplied(config: ModelConfig) -> int:
    """Return how many weights every token is multiplied by.

    They are those of attention, of dense layers and of a shared expert, in all layers.
    """
    dense = (config.num_layers - num_mixed(config)) * 3 * config.hidden_size * config.intermediate_size
    shared = num_mixed(config) * expert_weights(config) if experts_of(config).as_llama4 else 0
    return config.num_layers * attention_weights(config) + dense + shared


def num_mixed(config: ModelConfig) -> int:
    return sum(config.experts_of(layer) is not None for layer in range(config.num_layers))


def attention_weights(config: ModelConfig) -> int:
    return config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)


def expert_weights(config: ModelConfig) -> int:
    return 3 * config.hidden_size * experts_of(config).intermediate_size


def experts_of(config: ModelConfig) -> Experts:
    assert config.experts is not None, "this model has none"
    return config.experts


if __name__ == "__main__":
    main()
