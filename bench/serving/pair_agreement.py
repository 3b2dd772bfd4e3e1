"""The check that a pair's greedy tokens are those of one worker and of transformers.

    python -m bench.serving.pair_agreement --transfers ucx,shm,tcp

It runs through HTTP over each transport, in float32, with prefill in chunks of 64 tokens: all prompts at once, then all
of them again with prefix hits on both sides.
"""

import argparse
import asyncio
import logging
from pathlib import Path

from bench.engine.agreement import prompts
from bench.load.client import session
from bench.models.transformers_oracle import greedy, oracle
from bench.report.result import ResultRow, write_result
from bench.system.local_system import System, running
from engine.loader import load_engine
from engine.settings import EngineSettings

CHUNKED = {"TANDEM_MAX_BATCHED_TOKENS": "64"}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse()
    asked, expected = reference(args.prompts, args.tokens)
    rows = measure("mixed", ("--prefill", "0", "--decode", "0", "--mixed", "1"), asked, expected)
    for transfer in args.transfers.split(","):
        rows += measure(transfer, ("--transfer", transfer), asked, expected)
    config = {"prompts": args.prompts, "tokens": args.tokens, "dtype": "float32", "chunk": 64}
    logging.info("%s", write_result(args.out, "pair-agreement", rows, config))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transfers", default="ucx,shm,tcp")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=None, help="result file")
    return parser.parse_args()


def reference(num_prompts: int, num_tokens: int) -> tuple[list[list[int]], list[list[str]]]:
    """Return prompts, and what transformers answers in float32 on the same weights, each token as text."""
    engine = load_engine(EngineSettings(dtype="float32", kv_cache_nbytes=1 << 26))
    asked, model, tokenizer = prompts(engine, num_prompts), oracle(engine.checkpoint), engine.checkpoint.tokenizer()
    answers = [greedy(model, prompt, num_tokens) for prompt in asked]
    return asked, [[tokenizer.decode([token], skip_special_tokens=False) for token in answer] for answer in answers]


def measure(name: str, flags: tuple[str, ...], asked: list[list[int]], expected: list[list[str]]) -> list[ResultRow]:
    with running(*flags, "--dtype", "float32", **CHUNKED) as system:
        rows = []
        for turn in ("cold", "with prefix hits"):
            answers = asyncio.run(ask_all(system, asked, len(expected[0])))
            equal = sum(tokens == wanted for (tokens, _), wanted in zip(answers, expected, strict=True))
            cached = sum(cached for _, cached in answers)
            params = {"system": name, "turn": turn, "cached_tokens": cached}
            rows.append(ResultRow("answers equal to transformers float32", equal, "answers", params, limit=len(asked)))
            logging.info("%s, %s: %d of %d equal, %d cached tokens", name, turn, equal, len(asked), cached)
        return rows


async def ask_all(system: System, asked: list[list[int]], num_tokens: int) -> list[tuple[list[str], int]]:
    """Return for each prompt the answer's tokens as text, and how many prompt tokens were cached."""
    async with session() as http:

        async def ask(prompt: list[int]) -> tuple[list[str], int]:
            body = {
                "model": system.model(),
                "prompt": prompt,
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 0,
                "skip_special_tokens": False,
            }
            async with http.post(f"{system.url}/v1/completions", json=body) as response:
                reply = await response.json()
                if response.status != 200:
                    raise RuntimeError(f"{response.status}: {reply}")
                cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                return reply["choices"][0]["logprobs"]["tokens"], cached

        return await asyncio.gather(*(ask(prompt) for prompt in asked))


if __name__ == "__main__":
    main()
