"""The benchmark of a prompt that is computed beside answers on a GPU.

`python -m bench.engine.mixed_batches [--out FILE] [--answers 4 64] [--chunks 256 512 1024 2048]`

The model has Llama-8B's shape and random weights in FP8; all goes through Engine.submit and Engine.step. The rows show
how far apart the answers' tokens are while a prompt is computed beside them in chunks, and how fast the prompt is
computed. The limit of a step is the longer of two times: to read weights, head and KV once, and to multiply at the rate
of FP8 products. The same is measured for prompts whose log-probabilities are asked for (`prompt_logprobs`).
"""

import argparse
import gc
import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from msgspec import structs

from bench.engine.gpu import (
    PROMPT,
    answering,
    flops_per_token,
    host_ms,
    limit_ms,
    random_requests,
    settled,
    shown,
    silent,
)
from bench.models.random_model import SHAPES, open_random
from bench.report.hardware_limits import FP8_ROW_RATE
from bench.report.result import ResultRow, write_result
from engine.backend import Backend
from engine.cuda.device_sampler import DeviceSampler, SamplingKernel
from engine.cuda.loader import DeviceBackendBuilder
from engine.cuda.runner import DeviceRunner
from engine.engine import Engine
from engine.settings import EngineSettings
from kernels import caps, catalog

ANSWERS, CHUNKS = (4, 16, 64), (128, 256, 512, 1024, 2048)
LENGTH, NUM_PROMPTS = 8192, 3


@dataclass(frozen=True)
class MixedStepTimes:
    """The gaps between steps that gave answers tokens, and the time until the prompt's first token."""

    gaps_ms: list[float]
    prompt_s: float


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--answers", nargs="+", type=int, default=list(ANSWERS), help="how many are running")
    parser.add_argument(
        "--chunks", nargs="+", type=int, default=list(CHUNKS), help="tokens in a step, those of the answers included"
    )
    args = parser.parse_args()
    rows: list[ResultRow] = []
    for engine, chunk in engines(args.chunks):
        for num_answers in args.answers:
            rows += [shown(row) for row in measure(engine, chunk, num_answers)]
    config = {"model": "llama-8b's shape, random weights", "card": caps.detect().name, "prompt": LENGTH}
    write_result(args.out, "engine-gpu-mixed", rows, config)


def engines(chunks: list[int]) -> Iterator[tuple[Engine, int]]:
    """Yield an engine for each chunk size, all on the same weights and captured graphs."""
    device = torch.device("cuda:0")
    settings = EngineSettings(
        model="llama-8b", dtype="float8", max_num_seqs=256, max_batched_tokens=2048, max_model_len=LENGTH + 64,
        prefix_cache=False,
    )  # fmt: skip
    checkpoint, source = open_random(settings.model, device)
    launcher, max_model_len = DeviceBackendBuilder(settings, checkpoint, source, device).prepare(silent)
    drawer = SamplingKernel(
        catalog.registry(caps.detect()), SHAPES[settings.model].vocab_size, settings.max_num_seqs, device
    )
    sampler = DeviceSampler(checkpoint.eos_token_ids, drawer)
    for chunk in chunks:
        runner = DeviceRunner(launcher, sampler)
        backend = Backend(launcher.cache, runner, sampler, settings.dtype, max_model_len, caches_decoded_kv=False)
        engine = Engine(replace(settings, max_mixed_tokens=chunk), checkpoint, backend)
        with settled(engine):
            yield engine, chunk


def measure(engine: Engine, chunk: int, num_answers: int) -> list[ResultRow]:
    gc.collect()
    requests = random_requests(engine, [PROMPT] * num_answers, LENGTH - PROMPT)
    with answering(engine, requests):
        found = [time_mixed_steps(engine) for _ in range(NUM_PROMPTS)]
        scored = time_mixed_steps(engine, prompt_logprobs=1)
        host = host_of_prompt(engine)
    params = {"answers": num_answers, "chunk": chunk}
    gaps = [gap for one in found for gap in one.gaps_ms]
    return [
        ResultRow("engine_mixed_gap", statistics.median(gaps), "ms", params, step_limit_ms(engine, chunk, num_answers)),
        ResultRow("engine_mixed_gap_longest", max(gaps), "ms", params),
        ResultRow("engine_mixed_prompt", LENGTH / statistics.median(one.prompt_s for one in found), "tokens/s", params),
        ResultRow(
            "engine_mixed_gap", statistics.median(scored.gaps_ms), "ms", params | {"asks for": "prompt_logprobs"}
        ),
        ResultRow("engine_mixed_host_work", host, "ms", params),
    ]


def time_mixed_steps(engine: Engine, **asked: int) -> MixedStepTimes:
    """Compute one prompt and time the steps meanwhile; `asked` changes its SamplingParams."""
    (prompt,) = random_requests(engine, [LENGTH], 1)
    prompt = replace(prompt, sampling=structs.replace(prompt.sampling, **asked))
    begin = time.perf_counter()
    engine.submit(prompt)
    stamps = [begin]
    while True:
        told = [each.request_id for each in engine.step().sampled]
        if told:
            stamps.append(time.perf_counter())
        if prompt.request_id in told:
            break
    # The first gaps belong to steps that were under way before.
    return MixedStepTimes([(late - early) * 1e3 for early, late in pairwise(stamps[2:])], stamps[-1] - begin)


def host_of_prompt(engine: Engine, num_steps: int = 3) -> float:
    """Return the milliseconds that the host works in a step with a chunk, not counting waits for tokens.

    The prompt ends when the answers do.
    """
    (prompt,) = random_requests(engine, [LENGTH], 1)
    engine.submit(prompt)
    engine.step()
    return host_ms(engine, num_steps)


def step_limit_ms(engine: Engine, chunk: int, num_answers: int) -> float:
    """Return the limit in milliseconds of a step in the middle of the prompt."""
    config = engine.checkpoint.config
    read = limit_ms(config, num_answers, PROMPT, "float8")
    flops = (chunk - num_answers) * flops_per_token(config, LENGTH) + num_answers * flops_per_token(config, PROMPT)
    return max(read, flops / FP8_ROW_RATE * 1e3)


if __name__ == "__main__":
    main()
