"""The benchmark of decode steps on a GPU that sample, or that process their logits first.

`python -m bench.engine.logits_processors [--out FILE] [--batches 1 64]`

The model has Llama-8B's shape and random weights in FP8; all goes through Engine.submit and Engine.step. The rows show
what penalties, biases, banned words and grammars cost beside the same batch without them, how long the GPU was idle,
and the longest step. The tokenizer has as many tokens as the model: all bytes, then words of up to four letters.
"""

import argparse
import gc
import itertools
import json
import logging
import string
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher
from msgspec import structs
from tokenizers import Tokenizer

from bench.engine.gpu import NUM_STEPS, PROMPT, answering, host_ms, idle_share, random_requests, settled, silent
from bench.models.random_model import SHAPES, byte_tokenizer, open_random
from bench.report.result import ResultRow, shown, write_result
from contracts.sampling import SamplingParams
from engine.engine import Engine
from engine.loader import load_device_engine
from engine.settings import EngineSettings
from kernels import caps

BATCHES = (1, 8, 64)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdjustedCase:
    """A batch in which `num_rows` rows (None: all) use the parameters `adjusted`, and the others none."""

    name: str
    adjusted: SamplingParams
    num_rows: int | None = None


PLAIN = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0, ignore_eos=True)
ENDLESS = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


def cases(vocab: int) -> list[AdjustedCase]:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(ENDLESS), overrides={"whitespace_flexible": False})
    penalties = asking(repetition_penalty=1.1, frequency_penalty=0.2)
    every = {token: token % 7 - 3.0 for token in range(vocab)}
    return [
        AdjustedCase("nothing", PLAIN),
        AdjustedCase("temperature 0.8", asking(temperature=0.8)),
        AdjustedCase("temperature 0.8, top_p 0.95", asking(temperature=0.8, top_p=0.95)),
        AdjustedCase("temperature 0.7, top_k 20, top_p 0.8", asking(temperature=0.7, top_k=20, top_p=0.8)),
        AdjustedCase("penalties, one row", penalties, 1),
        AdjustedCase("penalties", penalties),
        AdjustedCase("bias of 300 tokens", asking(logit_bias=dict(islice(every.items(), 300)))),
        AdjustedCase("bias of all tokens, one row", asking(logit_bias=every), 1),
        AdjustedCase("bad words of two tokens", asking(bad_words=tuple((5, token) for token in range(20)))),
        AdjustedCase("JSON schema, one row", asking(grammar=grammar), 1),
        AdjustedCase("JSON schema", asking(grammar=grammar)),
        AdjustedCase("JSON schema, drawn at random", asking(grammar=grammar, temperature=0.8, top_p=0.95)),
    ]


def asking(**changes: Any) -> SamplingParams:
    return structs.replace(PLAIN, **changes)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    args = parser.parse_args()
    settings = EngineSettings(
        model="llama-8b", dtype="float8", max_num_seqs=max(args.batches), max_batched_tokens=2048, max_model_len=4096,
        prefix_cache=False,
    )  # fmt: skip
    engine, rows = load(settings), []
    with settled(engine):
        for batch in args.batches:
            for case in cases(engine.checkpoint.config.vocab_size):
                rows += [shown(row) for row in measure(engine, case, batch)]
    config = {"model": "llama-8b's shape, random weights", "card": caps.detect().name}
    write_result(args.out, "engine-gpu-adjusted", rows, config)


def load(settings: EngineSettings) -> Engine:
    device = torch.device("cuda:0")
    checkpoint, source = open_random(settings.model, device)
    vocab = SHAPES[settings.model].vocab_size
    checkpoint = replace(checkpoint, build_tokenizer=lambda: word_tokenizer(vocab), eos_token_ids=(vocab - 1,))
    return load_device_engine(settings, checkpoint, silent, source, device, open_random)


def word_tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer of all bytes and then the first words by length and alphabet."""
    return byte_tokenizer(islice(_words(), size - 256))


def _words() -> Iterator[str]:
    for length in count(2):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))


def measure(engine: Engine, case: AdjustedCase, batch: int) -> list[ResultRow]:
    """Return the median and longest time of a step, the idle share of the GPU, and the host's work."""
    gc.collect()
    asked = [case.adjusted if case.num_rows is None or row < case.num_rows else PLAIN for row in range(batch)]
    made = random_requests(engine, [PROMPT] * batch, 1)
    requests = [replace(request, sampling=sampling) for request, sampling in zip(made, asked, strict=True)]
    with answering(engine, requests):
        stamps = [time.perf_counter()]
        for _ in range(NUM_STEPS):
            assert len(engine.step().sampled) == batch
            stamps.append(time.perf_counter())
        idle, host = idle_share(engine), host_ms(engine)
    taken = sorted(late - early for early, late in pairwise(stamps))
    params = {"asks for": case.name, "batch": batch}
    return [
        ResultRow("adjusted_step", taken[len(taken) // 2] * 1e3, "ms", params),
        ResultRow("adjusted_step_slowest", taken[-1] * 1e3, "ms", params),
        ResultRow("adjusted_gpu_idle", idle, "", params),
        ResultRow("adjusted_host_work", host, "ms", params),
    ]


if __name__ == "__main__":
    main()
