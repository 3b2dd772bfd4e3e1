"""The benchmark of the KV codecs: what each level saves, takes and loses on a real model.

    python -m bench.handoff.codec [--prompts 8] [--prompt-tokens 768] [--tokens 64] [--out FILE]

Prompts are computed in float32. For each level all of their KV goes through the codec, plane by plane as in a handoff,
and answers go on from what came out: along the undisturbed greedy answer, for the KL divergence of the next token's
distribution and the share of equal greedy tokens; and freely, for a number that stands somewhere in a long prompt.
Sizes and rates are those of one core, by number format: the same KV, rounded to it.
"""

import argparse
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from bench.report.result import ResultRow, write_result
from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.engine import Engine
from engine.loader import load_engine
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from engine.settings import EngineSettings
from kv_transfer.codecs import codec
from kv_transfer.codecs.level import EXACT_PAGES, LEVELS, CodecLevel
from kv_transfer.codecs.numbers import from_float32, to_float32
from kv_transfer.codecs.page_format import PageFormat, PageRun

DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
RUN_PAGES = 64
TEXTS = Path("docs/design")
NEEDLE_TOKENS = 8
T = TypeVar("T")
_log = logging.getLogger(__name__)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse()
    engine = load_engine(EngineSettings(model=args.model, dtype="float32", kv_cache_nbytes=args.cache_mib << 20))
    sequences = place(engine, text_prompts(engine, args.prompts, args.prompt_tokens), args.tokens)
    needles, numbers = needle_prompts(engine, args.prompts, args.prompt_tokens)
    seekers = place(engine, needles, NEEDLE_TOKENS, sequences[-1].blocks[-1] + 1)
    first = torch.cat([compute(engine, sequence) for sequence in sequences])
    first_of_seekers = torch.cat([compute(engine, sequence) for sequence in seekers])
    kept = engine.transfer_pool.copy()
    exact = forward(engine, sequences, first, None, args.tokens)
    rows = [needle_row("off", engine, seekers, first_of_seekers, numbers)]
    for level in LEVELS.values():
        rows += size_rows(kept, [*sequences, *seekers], engine, level)
        through(level, kept, [*sequences, *seekers], engine)
        rows += loss_rows(level, engine, sequences, first, exact)
        rows.append(needle_row(level.name, engine, seekers, first_of_seekers, numbers))
        for row in rows[-14:]:
            _log.info("%s %s %.5g %s", row.name, dict(row.params), row.value, row.unit)
    config = {"model": args.model, "prompts": args.prompts, "prompt_tokens": args.prompt_tokens, "tokens": args.tokens}
    _log.info("%s", write_result(args.out, "kv-codec", rows, config))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder, GGUF file or hub id; the default model if empty")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cache-mib", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def text_prompts(engine: Engine, count: int, num_tokens: int) -> list[list[int]]:
    """Return prompts that ask for a summary of different stretches of the documentation."""
    tokenizer = engine.checkpoint.tokenizer()
    text = tokenizer.encode("".join(path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.md")))).ids
    head = tokenizer.encode("<|im_start|>user\nSummarize this text.\n").ids
    tail = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n").ids
    size = num_tokens - len(head) - len(tail)
    starts = np.linspace(0, len(text) - size, count, dtype=int)
    return [[*head, *text[start : start + size], *tail] for start in starts]


def needle_prompts(engine: Engine, count: int, num_tokens: int) -> tuple[list[list[int]], list[str]]:
    """Return prompts that hide a number at different depths of a text and ask for it, and the numbers."""
    tokenizer, rng = engine.checkpoint.tokenizer(), np.random.default_rng(0)
    text = tokenizer.encode(
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back. " * 400
    )
    numbers = [str(number) for number in rng.integers(10000, 99999, count)]
    prompts = []
    for index, number in enumerate(numbers):
        needle = tokenizer.encode(f"\nThe pass key is {number}. Remember it. {number} is the pass key.\n").ids
        end = tokenizer.encode("\nWhat is the pass key? The pass key is").ids
        filler = text.ids[: num_tokens - len(needle) - len(end)]
        depth = len(filler) * (index + 1) // (count + 1)
        prompts.append([*filler[:depth], *needle, *filler[depth:], *end])
    return prompts, numbers


def place(engine: Engine, prompts: SequenceOf[list[int]], num_answered: int, first_block: int = 0) -> list[Sequence]:
    """Return sequences with blocks of their own for prompt and answer."""
    sequences = []
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=num_answered, seed=0)
        sequence = Sequence(RequestId(f"codec-{first_block}-{index}"), prompt, sampling)
        end = first_block + engine.layout.num_blocks(len(prompt) + num_answered)
        sequence.blocks.extend(range(first_block, end))
        first_block = end
        sequences.append(sequence)
    if first_block > engine.capacity_tokens // engine.layout.block_size:
        raise ValueError(f"the prompts need {first_block} blocks: set --cache-mib higher, or fewer --prompts")
    return sequences


def compute(engine: Engine, sequence: Sequence) -> torch.Tensor:
    """Fill the cache with the prompt; return the logits of token 0, `[1, vocab]`."""
    return engine.runner.forward([ScheduledChunk(sequence, 0, sequence.num_prompt)]).logits.clone()


def forward(
    engine: Engine,
    sequences: SequenceOf[Sequence],
    first: torch.Tensor,
    forced: torch.Tensor | None,
    num_tokens: int,
) -> torch.Tensor:
    """Return logits `[tokens, sequences, vocab]` along `forced` tokens, or along the greedy ones.

    `forced`: `[tokens, sequences]`. `first`: the logits of token 0.
    """
    steps = [first]
    for sequence in sequences:
        del sequence.tokens[sequence.num_prompt :]
    for index in range(num_tokens - 1):
        tokens = steps[-1].argmax(-1) if forced is None else forced[index]
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            sequence.tokens.append(token)
        chunks = [ScheduledChunk(sequence, len(sequence.tokens) - 1, 1) for sequence in sequences]
        steps.append(engine.runner.forward(chunks).logits.clone())
    return torch.stack(steps)


def format_of(engine: Engine, dtype: str) -> PageFormat:
    group = engine.layout.only_group
    return PageFormat(dtype, group.num_kv_heads, group.block_size, group.head_dim)


def through(level: CodecLevel, kept: np.ndarray, sequences: SequenceOf[Sequence], engine: Engine) -> None:
    """Replace the KV of the prompts by what the level makes of it."""
    pool, format_ = engine.transfer_pool, format_of(engine, engine.layout.only_group.dtype)
    for plane, blocks, run in runs(sequences, engine):
        data = kept[plane, blocks].reshape(-1)
        payload, out = codec.encode(data, [run], format_, level), np.empty_like(data)
        codec.decode(memoryview(payload), [run], format_, out)
        pool[plane, blocks] = out.reshape(len(blocks), -1)


def runs(sequences: SequenceOf[Sequence], engine: Engine) -> list[tuple[int, list[int], PageRun]]:
    """Return plane, blocks and run of all pages of the prompts."""
    found = []
    for sequence in sequences:
        blocks = sequence.blocks[: engine.layout.num_blocks(sequence.num_prompt)]
        for plane in range(engine.layout.only_group.num_planes):
            for start in range(0, len(blocks), RUN_PAGES):
                some = blocks[start : start + RUN_PAGES]
                found.append((plane, some, PageRun(len(some), plane % 2 == 0, EXACT_PAGES if start == 0 else 0)))
    return found


def size_rows(kept: np.ndarray, sequences: SequenceOf[Sequence], engine: Engine, level: CodecLevel) -> list[ResultRow]:
    """Return ratio, bits a value and the rates of both ends, by number format."""
    rows = []
    for dtype in DTYPES:
        format_, nbytes, coded, encode_s, decode_s = format_of(engine, dtype), 0, 0, 0.0, 0.0
        for plane, blocks, run in runs(sequences, engine)[::7]:
            data = from_float32(
                to_float32(kept[plane, blocks].reshape(-1), engine.layout.only_group.dtype), dtype
            ).copy()
            out = np.empty_like(data)
            payload, took_s = timed(lambda: codec.encode(data, [run], format_, level))  # noqa: B023 - called at once
            encode_s += took_s
            decode_s += timed(lambda: codec.decode(memoryview(payload), [run], format_, out))[1]  # noqa: B023
            nbytes, coded = nbytes + data.nbytes, coded + len(payload)
        params = {"level": level.name, "dtype": dtype}
        rows += [
            ResultRow("ratio", nbytes / coded, "times", params),
            ResultRow("bits a value", 8 * coded / (nbytes / format_.item_nbytes), "bit", params),
            ResultRow("encode", nbytes / encode_s / 1e9, "GB/s of CPU time", params),
            ResultRow("decode", nbytes / decode_s / 1e9, "GB/s of CPU time", params),
        ]
    return rows


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return what the call returns, and the seconds of CPU time of this thread alone."""
    start = time.thread_time()
    found = call()
    return found, time.thread_time() - start


def loss_rows(
    level: CodecLevel, engine: Engine, sequences: SequenceOf[Sequence], first: torch.Tensor, exact: torch.Tensor
) -> list[ResultRow]:
    """Return the rows of KL divergence and agreement; token 0 is prefill's, and does not count."""
    found = forward(engine, sequences, first, exact.argmax(-1), len(exact))[1:]
    expected, ours = exact[1:].double().log_softmax(-1), found.double().log_softmax(-1)
    divergence = (expected.exp() * (expected - ours)).sum(-1).flatten()
    equal = (expected.argmax(-1) == ours.argmax(-1)).double().mean()
    params = {"level": level.name}
    return [
        ResultRow("KL divergence", float(divergence.mean()), "nats", params),
        ResultRow("KL divergence, 99th percentile", float(divergence.quantile(0.99)), "nats", params),
        ResultRow("greedy tokens equal, teacher-forced", float(equal), "of 1", params, limit=1.0),
    ]


def needle_row(
    name: str, engine: Engine, sequences: SequenceOf[Sequence], first: torch.Tensor, numbers: SequenceOf[str]
) -> ResultRow:
    """Return the share of hidden numbers that the greedy answers say."""
    answers = forward(engine, sequences, first, None, NEEDLE_TOKENS).argmax(-1).T.tolist()
    tokenizer = engine.checkpoint.tokenizer()
    hits = [number in tokenizer.decode(answer) for answer, number in zip(answers, numbers, strict=True)]
    return ResultRow("needles found", sum(hits) / len(hits), "of 1", {"level": name}, limit=1.0)


if __name__ == "__main__":
    main()
