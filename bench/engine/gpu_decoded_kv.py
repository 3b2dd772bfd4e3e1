"""The benchmark of how far an answer's KV on a GPU is from what computing it as a prompt gives.

`python -m bench.engine.gpu_decoded_kv [--dtypes bfloat16 float8] [--out FILE]`

Later prompts share the KV of answers. It is decoded step by step, and rounds otherwise than a prompt that is computed
in one piece; so does a prompt whose first part was computed before, as behind any hit in the prefix cache. Both are
compared with the one piece: the relative error of K and V over the same tokens, and how often a next answer's first
greedy tokens are the same. Random weights in Llama-8B's shape, whose likeliest words are closer than a trained model's.
"""

import argparse
import logging
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bench.engine.gpu import load, settled
from bench.report.result import ResultRow, shown, write_result
from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.engine import Engine
from engine.messages import EngineRequest
from engine.sequence import Sequence as EngineSequence
from kernels import caps

PROMPT, ANSWER, NEXT = 1024, 257, 8
FORMATS = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "float32": torch.float32}
_log, _random = logging.getLogger(__name__), np.random.default_rng(11)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float8"])
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    rows: list[ResultRow] = []
    for dtype in args.dtypes:
        engine = load(dtype, args.model, prefix_cache=True, kv_cache_nbytes=8 << 30, max_model_len=2048)
        with settled(engine):
            rows += [shown(row) for row in measured(engine, dtype, args.rounds)]
    config = {"model": f"{args.model}'s shape, random weights", "card": caps.detect().name, "rounds": args.rounds}
    path = write_result(args.out, "gpu-decoded-kv", rows, config)
    _log.info("%s", path.with_suffix(".md").read_text(encoding="utf-8"))


def measured(engine: Engine, dtype: str, rounds: int) -> list[ResultRow]:
    """Return the errors of decoded KV beside those of a prompt that was computed in two pieces."""
    errors: dict[str, list[float]] = {"decoded": [], "in two pieces": []}
    equal = dict.fromkeys(errors, 0)
    for _ in range(rounds):
        prompt = _random.integers(0, 100_000, PROMPT).tolist()
        turn = [*prompt, *answer(engine, prompt, ANSWER)]
        blocks = range(PROMPT // engine.layout.block_size, len(turn) // engine.layout.block_size)
        found = {"decoded": (kv(engine, turn, blocks), answer(engine, turn, NEXT))}
        evict(engine)
        whole = answer(engine, turn, NEXT), kv(engine, turn, blocks)
        evict(engine)
        answer(engine, prompt, 1)
        said = answer(engine, turn, NEXT)
        found["in two pieces"] = kv(engine, turn, blocks), said
        evict(engine)
        for name, (values, tokens) in found.items():
            errors[name].append(float((values - whole[1]).norm() / whole[1].norm()))
            equal[name] += next((i for i, (a, b) in enumerate(zip(tokens, whole[0], strict=True)) if a != b), NEXT)
    facts = {"dtype": dtype, "tokens": f"{PROMPT} and {ANSWER - 1} of an answer", "runs": rounds}
    two = "a prompt in two pieces"
    medians = {name: statistics.median(values) for name, values in errors.items()}
    return [
        ResultRow(
            "relative error of decoded K and V", medians["decoded"], "", facts, peer=two,
            peer_value=medians["in two pieces"],
        ),
        ResultRow(
            "next tokens that are equal from the first on", equal["decoded"] / rounds, f"of {NEXT}", facts, peer=two,
            peer_value=equal["in two pieces"] / rounds,
        ),
    ]  # fmt: skip


def answer(engine: Engine, prompt: Sequence[int], num_tokens: int) -> list[int]:
    sampling = SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=True)
    engine.submit(EngineRequest(RequestId("asked"), list(prompt), sampling))
    tokens: list[int] = []
    while engine.has_work():
        tokens += [sampled.token.token_id for sampled in engine.step().sampled]
    return tokens


def kv(engine: Engine, tokens: Sequence[int], blocks: range) -> torch.Tensor:
    """Return K and V of these blocks of a text as they are cached, float32, without the scales of planes."""
    size = engine.layout.block_size
    sequence = EngineSequence(RequestId("digests"), list(tokens), SamplingParams(max_tokens=1, seed=0))
    pages = engine.pool.find_by_digest(sequence.extend_digests(size, blocks.stop))
    assert len(pages) == blocks.stop, f"{len(pages)} of {blocks.stop} blocks are cached"
    pool = engine.transfer_pool
    planes = pool.memory.tensor.view(pool.num_planes, pool.num_blocks + 1, pool.page_nbytes)
    torch.cuda.synchronize()
    found = planes[:, torch.tensor(pages[blocks.start :], device=planes.device)]
    return found.contiguous().view(FORMATS[engine.layout.only_group.dtype]).float()


def evict(engine: Engine) -> None:
    """Empty the GPU's prefix cache."""
    engine.pool.release(engine.pool.allocate(engine.pool.num_available))


if __name__ == "__main__":
    main()
