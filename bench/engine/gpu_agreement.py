"""The benchmark of how much answers on a GPU depend on the batch and on the number format.

`python -m bench.engine.gpu_agreement MODEL`

It compares greedy answers of a real model, alone and all at once, in each format, with transformers on the same weights
and card. Where two answers part, it measures how close the two tokens are for transformers in float32. It also measures
the perplexity of a text, the help topics that Python ships.
"""

import argparse
import logging
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import PreTrainedModel

from bench.engine.moe import agreed
from bench.models.transformers_oracle import oracle
from bench.report.result import ResultRow, write_result
from checkpoint import open_checkpoint
from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import EngineRequest
from engine.settings import EngineSettings

PROMPTS = (
    "Why is the sky blue?",
    "Write a short poem about a lighthouse.",
    "List five uses of a paper clip.",
    "Explain what a hash table is to a child.",
    "What is 17 times 23? Think step by step.",
    "Give me a recipe for pancakes.",
    "Who wrote Don Quixote, and when?",
    "Summarise the plot of Romeo and Juliet in three sentences.",
)
NUM_TOKENS, NUM_CHARS, CHUNK = 64, 100_000, 1024
_log = logging.getLogger(__name__)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float8"])
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    tokenizer = checkpoint.tokenizer()
    prompts = [tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids for text in PROMPTS]
    text = tokenizer.encode("\n".join(topics[name] for name in sorted(topics))[:NUM_CHARS]).ids
    exact = oracle(checkpoint, torch.float32).to("cuda")  # type: ignore[arg-type]
    peers = transformers_ways(oracle(checkpoint, torch.bfloat16).to("cuda"), prompts)  # type: ignore[arg-type]
    peers["transformers float32"] = transformers_answers(exact, prompts)
    plain, *ways = peers
    rows = []
    for name in ways:
        rows += agreement(plain, peers[plain], name, peers[name])
        rows += parting_rows(exact, prompts, plain, peers[plain], name, peers[name])
    scores: dict[str, list[float]] = {}
    for dtype in args.dtypes:
        settings = {"device": "cuda", "max_model_len": 2048, "max_num_seqs": 8, "kv_cache_nbytes": 1 << 30}
        engine = load_engine(EngineSettings(model=args.model, dtype=dtype, **settings))  # type: ignore[arg-type]
        alone = [engine_answers(engine, [prompt])[0] for prompt in prompts]
        others = {"itself in a batch": engine_answers(engine, prompts), **peers}
        for name, answers in others.items():
            rows += agreement(dtype, alone, name, answers)
            rows += parting_rows(exact, prompts, dtype, alone, name, answers)
        _log.info("%s says: %r", dtype, tokenizer.decode(alone[0])[:120])
        scores[dtype] = logprobs(engine, text)
        rows += perplexities(scores)
    for row in rows:
        _log.info("%s %s: %.6g %s", row.name, dict(row.params), row.value, row.unit)
    _log.info(
        "%s", write_result(args.out, "engine-gpu-agreement", rows, {"tokens": len(text), "prompts": len(PROMPTS)})
    )


def engine_answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
    answers: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        engine.submit(EngineRequest(RequestId(str(index)), prompt, sampling))
    while engine.has_work():
        for sampled in engine.step().sampled:
            answers[sampled.request_id].append(sampled.token.token_id)
    return list(answers.values())


def logprobs(engine: Engine, token_ids: list[int]) -> list[float]:
    """Return the log-probabilities of a text, in chunks of `CHUNK` tokens that are scored separately."""
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=0)
    for first in range(0, len(token_ids), CHUNK):
        engine.submit(EngineRequest(RequestId(f"chunk {first}"), token_ids[first : first + CHUNK], sampling))
    found: dict[str, list[float]] = {}
    while engine.has_work():
        for scored in engine.step().scored:
            found.setdefault(scored.request_id, []).extend(token.logprob for token in scored.tokens)
    return [logprob for first in range(0, len(token_ids), CHUNK) for logprob in found[f"chunk {first}"]]


def perplexities(scores: dict[str, list[float]]) -> list[ResultRow]:
    """Return the perplexity of the last format and its excess over each earlier one.

    The excess is in per cent, with its standard error.
    """
    *others, dtype = scores
    rows = [ResultRow("perplexity", math.exp(-statistics.fmean(scores[dtype])), "", {"dtype": dtype})]
    for other in others:
        lost = [b - a for a, b in zip(scores[dtype], scores[other], strict=True)]
        params = {"dtype": dtype, "above": other}
        rows.append(ResultRow("perplexity above", 100 * math.expm1(statistics.fmean(lost)), "%", params))
        rows.append(ResultRow("standard error", 100 * statistics.stdev(lost) / math.sqrt(len(lost)), "%", params))
    return rows


def transformers_ways(model: PreTrainedModel, prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """Return the answers of transformers with its default attention and with eager attention.

    They show how far a format agrees with itself.
    """
    answers = {"transformers bfloat16": transformers_answers(model, prompts)}
    model.set_attn_implementation("eager")
    return {**answers, "transformers bfloat16, eager attention": transformers_answers(model, prompts)}


@torch.inference_mode()
def transformers_answers(model: torch.nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        step = model(torch.tensor([prompt], device="cuda"), use_cache=True, logits_to_keep=1)
        answer: list[int] = []
        while len(answer) < NUM_TOKENS:
            answer.append(int(step.logits[0, -1].argmax()))
            last = torch.tensor([answer[-1:]], device="cuda")
            step = model(last, past_key_values=step.past_key_values, use_cache=True)
        answers.append(answer)
    return answers


def agreement(dtype: str, one: Sequence[list[int]], name: str, other: Sequence[list[int]]) -> list[ResultRow]:
    """Return how many answers are identical, and how many tokens precede the first difference."""
    same = sum(a == b for a, b in zip(one, other, strict=True))
    until = [agreed(a, b) for a, b in zip(one, other, strict=True)]
    params = {"dtype": dtype, "beside": name}
    return [
        ResultRow("identical answers", same, f"of {len(one)}", params),
        ResultRow("tokens before a difference", sum(until), f"of {NUM_TOKENS * len(one)}", params),
    ]


@torch.inference_mode()
def parting_rows(
    model: torch.nn.Module,
    prompts: Sequence[list[int]],
    dtype: str,
    answers: Sequence[list[int]],
    name: str,
    others: Sequence[list[int]],
) -> list[ResultRow]:
    """Return how many nats apart `model` sees the two tokens where answers part, median and largest.

    Rounding should only reverse tokens that are nearly equally likely.
    """
    apart, device = [], next(model.parameters()).device
    for prompt, one, other in zip(prompts, answers, others, strict=True):
        at = agreed(one, other)
        if at < len(one):
            logits = model(torch.tensor([prompt + one[:at]], device=device), logits_to_keep=1).logits[0, -1]
            apart.append(abs(float(logits[one[at]] - logits[other[at]])))
    if not apart:
        return []
    params = {"dtype": dtype, "beside": name, "answers": len(apart)}
    return [
        ResultRow("nats apart where answers part, median", statistics.median(apart), "", params),
        ResultRow("nats apart where answers part, largest", max(apart), "", params),
    ]


if __name__ == "__main__":
    main()
