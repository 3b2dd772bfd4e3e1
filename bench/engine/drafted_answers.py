"""The check that greedy answers with drafts are those of transformers on the same weights.

`python -m bench.engine.drafted_answers [--drafters ngram eagle3] [--prompts 64] [--tokens 128] [--transfers shm,tcp]`

Prompts are of the kinds of bench.engine.speculation_texts, filled up with those of bench.engine.agreement. Each drafter
answers all of them with every draft verified whole: one at a time, in batches, again with prefix hits, with prompts in
chunks of 64 tokens, with a cache so small that answers are preempted, and under a grammar. Then a pair answers them
through HTTP over each transport, cold and with prefix hits, where the lengths of drafts follow what is measured. Each
figure is the number of equal answers; any other ends the run with code 1.
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from transformers import PreTrainedModel

from bench.engine.agreement import prompts as plain_prompts
from bench.engine.speculation_texts import PROMPTS, conversation
from bench.models.transformers_oracle import greedy, oracle
from bench.report.result import ResultRow, write_result
from bench.serving.pair_agreement import measure
from checkpoint import Checkpoint
from checkpoint.grammar_compiler import Vocabulary, compiled
from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import EngineRequest
from engine.settings import EngineSettings
from engine.speculative.choice import EAGLE3, SUFFIX_FIRST

DRAFTERS = ("ngram", "suffix", EAGLE3, SUFFIX_FIRST + EAGLE3)
GRAMMAR = LLMatcher.grammar_from_regex(r"([A-Z][a-z]{2,9}( [a-z]{1,9}){2,12}\. ){40}")
NUM_GUIDED = 16
LARGE, SMALL = 1 << 29, 800
"""The bytes of a cache that holds all prompts, and the tokens of one that preempts answers."""
WAYS = {
    "one at a time": {"max_num_seqs": 1, "prefix_cache": False},
    "in batches": {"max_num_seqs": 16},
    "chunks of 64 tokens": {"max_num_seqs": 5, "max_batched_tokens": 64, "prefix_cache": False},
    "preempted": {"max_num_seqs": 8, "prefix_cache": False, "kv_cache_nbytes": 0},
}
_log = logging.getLogger(__name__)

Ids = list[list[int]]


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = _arguments()
    base = EngineSettings(dtype="float32", kv_cache_nbytes=LARGE, num_threads=args.threads, adapts_drafts=False)
    plain = load_engine(base)
    asked = _prompts(plain, args.prompts)
    model = oracle(plain.checkpoint)
    expected = [greedy(model, prompt, args.tokens) for prompt in asked]
    guided = [_guided(model, plain.checkpoint, prompt, args.tokens) for prompt in asked[:NUM_GUIDED]]
    _log.info("transformers has answered")
    rows = [row for drafter in args.drafters for row in _alone(base, drafter, asked, expected, guided)]
    tokenizer = plain.checkpoint.tokenizer()
    texts = [[tokenizer.decode([token], skip_special_tokens=False) for token in answer] for answer in expected]
    for drafter in args.drafters:
        for transfer in filter(None, args.transfers.split(",")):
            flags = ("--transfer", transfer, "--speculate", drafter)
            rows += measure(f"pair, {transfer}, {drafter}", flags, asked, texts)
    config = {"prompts": args.prompts, "tokens": args.tokens, "dtype": "float32", "k": base.draft_tokens}
    _log.info("%s", write_result(args.out, "drafted-answers", rows, config).with_suffix(".md").read_text("utf-8"))
    return int(any(row.value != row.limit for row in rows if row.limit is not None))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--transfers", default="ucx,shm,tcp", help="of the pair; empty for none")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None, help="result file")
    return parser.parse_args()


def _prompts(engine: Engine, num_prompts: int) -> Ids:
    tokenizer = engine.checkpoint.tokenizer()
    texts = [text for kind in PROMPTS.values() for text in kind]
    found = [tokenizer.encode(conversation(text)).ids for text in texts]
    return (found + plain_prompts(engine, max(0, num_prompts - len(found))))[:num_prompts]


@torch.inference_mode()
def _guided(model: PreTrainedModel, checkpoint: Checkpoint, prompt: list[int], num_tokens: int) -> list[int]:
    """Return transformers' greedy answer among the tokens that the grammar allows."""
    matcher = compiled(Vocabulary.of(checkpoint).tokens(), GRAMMAR)
    bits = allocate_token_bitmask(1, checkpoint.config.vocab_size)
    step = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    answer: list[int] = []
    while len(answer) < num_tokens and not matcher.is_stopped():
        fill_next_token_bitmask(matcher, bits)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: checkpoint.config.vocab_size]
        logits = step.logits[0, -1].masked_fill(torch.from_numpy(allowed == 0), -torch.inf)
        answer.append(int(logits.argmax()))
        matcher.consume_token(answer[-1])
        step = model(torch.tensor([answer[-1:]]), past_key_values=step.past_key_values, use_cache=True)
    return answer


def _alone(base: EngineSettings, drafter: str, asked: Ids, expected: Ids, guided: Ids) -> list[ResultRow]:
    """Return the equal answers of one worker in each of the ways, and what was accepted."""
    rows: list[ResultRow] = []
    for way, changes in WAYS.items():
        engine = _engine(base, drafter, changes)
        rows.append(_row(engine, drafter, way, _answers(engine, asked, len(expected[0])), expected))
        if way == "in batches":
            rows.append(_row(engine, drafter, "prefix hits", _answers(engine, asked, len(expected[0])), expected))
            found = _answers(engine, asked[: len(guided)], len(expected[0]), grammar=GRAMMAR)
            rows.append(_row(engine, drafter, "under a grammar", found, guided))
        if way == "preempted":
            assert engine.stats().num_preemptions, "no answer was preempted"
        engine.close()
    return rows


def _engine(base: EngineSettings, drafter: str, changes: dict[str, int | bool]) -> Engine:
    chosen = replace(base, speculate=drafter, **changes)
    if chosen.kv_cache_nbytes == 0:
        layout = load_engine(replace(base, speculate=drafter, kv_cache_nbytes=1 << 26)).layout
        num_blocks = SMALL // layout.block_size
        chosen = replace(chosen, kv_cache_nbytes=num_blocks * layout.block_nbytes, max_model_len=SMALL)
    return load_engine(chosen)


def _row(engine: Engine, drafter: str, way: str, found: Ids, expected: Ids) -> ResultRow:
    stats = engine.stats()
    assert stats.num_drafts, f"{drafter} has drafted nothing {way}"
    length = 1 + sum(stats.num_accepted_by_place) / stats.num_drafts
    equal = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
    _log.info("%s, %s: %d of %d equal, %.2f tokens a draft", drafter, way, equal, len(expected), length)
    params = {"drafter": drafter, "way": way, "tokens of drafted steps so far": round(length, 3)}
    return ResultRow("answers equal to transformers float32", equal, "answers", params, limit=len(expected))


def _answers(engine: Engine, asked: Sequence[list[int]], num_tokens: int, grammar: str = "") -> Ids:
    sampling = SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=not grammar, grammar=grammar)
    found: dict[RequestId, list[int]] = {RequestId(str(index)): [] for index in range(len(asked))}
    for name, prompt in zip(found, asked, strict=True):
        engine.submit(EngineRequest(name, prompt, sampling))
    while engine.has_work():
        output = engine.step()
        assert not output.failed, output.failed
        for sampled in output.sampled:
            found[sampled.request_id].append(sampled.token.token_id)
    engine.check()
    return list(found.values())


if __name__ == "__main__":
    raise SystemExit(main())
