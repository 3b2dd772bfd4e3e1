"""The benchmark of speculative decoding on a CPU, beside the same build without it.

`python -m bench.engine.speculation [--out FILE] [--rounds 3] [--kinds chat "code edit"] [--skip-acceptance]
[--drafters ngram suffix eagle3 suffix+eagle3]`

Answers are greedy, to prompts of five kinds (bench.engine.speculation_texts), and the same in every run: that is
checked. Acceptance length is the tokens that a drafted step gives, its own included, with every draft verified whole.
Rates count from the first token of an answer to its last; engines with and without take turns, and share weights. The
rows of step times say what drafts cost where all are wrong.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch

from bench.engine.speculation_texts import PROMPTS, conversation
from bench.report.result import ResultRow, write_result
from checkpoint import Checkpoint, open_checkpoint
from checkpoint.huggingface.eagle3_folder import shipped_head
from contracts.ids import BlockId, RequestId
from contracts.sampling import SamplingParams
from engine.backend import Backend, Drafting, Runner
from engine.cpu.loader import load_cpu_backend
from engine.engine import Engine
from engine.messages import EngineRequest
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence as EngineSequence
from engine.settings import EngineSettings
from engine.speculative.choice import EAGLE3, SUFFIX_FIRST, head_name
from engine.speculative.proposer import Draft

MAX_TOKENS, NUM_STREAMS = 128, 16
DRAFTERS = ("ngram", "suffix", EAGLE3, SUFFIX_FIRST + EAGLE3)
DRAFT_CONTEXT = 128
LENGTHS = (1, 2, 3, 5)
CONTEXTS, NUM_ROWS, NUM_STEPS = (128, 1024), range(1, 7), 24
PEER = "the same build without speculation"
_names = count()
_log = logging.getLogger(__name__)

Ids = list[list[int]]


@dataclass(frozen=True)
class Answered:
    """The answers of a run, and how it got them. `num_steps`: that decode; `decode_s`: what they took."""

    answers: Ids
    num_steps: int
    num_drafts: int
    num_accepted: int
    decode_s: float
    num_decoded: int

    @property
    def rate(self) -> float:
        return self.num_decoded / self.decode_s

    @property
    def accepted_length(self) -> float:
        """Tokens of a step that verified a draft."""
        return 1 + self.num_accepted / max(1, self.num_drafts)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = _arguments()
    checkpoint = open_checkpoint(args.model)
    drafters = [name for name in args.drafters if head_name(name) is None or shipped_head(checkpoint.name)]
    settings = EngineSettings(
        model=args.model, dtype=args.dtype, prefix_cache=False, num_threads=args.threads,
        speculate=EAGLE3 if any(map(head_name, drafters)) else "off",
    )  # fmt: skip
    backend = load_cpu_backend(settings, checkpoint, lambda *_: None)
    tokenizer = checkpoint.tokenizer()
    prompts = {kind: [tokenizer.encode(conversation(text)).ids for text in PROMPTS[kind]] for kind in args.kinds}
    rows = step_rows(backend.runner)
    if backend.drafting is not None:
        rows += drafting_rows(backend.drafting)
    if not args.skip_acceptance:
        rows += acceptance_rows(settings, checkpoint, backend, prompts, drafters)
    rows += rate_rows(settings, checkpoint, backend, prompts, args.rounds, args.draft_tokens, drafters)
    config = {
        "model": checkpoint.name, "dtype": backend.dtype, "threads": torch.get_num_threads(), "rounds": args.rounds,
        "answers": MAX_TOKENS,
    }  # fmt: skip
    file = write_result(args.out, "speculation", rows, config)
    _log.info("%s", file.with_suffix(".md").read_text(encoding="utf-8"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder, GGUF file or hub id; the default model if empty")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3, help="0: acceptance and steps alone")
    parser.add_argument("--draft-tokens", type=int, default=3, help="most of a draft where rates are measured")
    parser.add_argument("--kinds", nargs="+", choices=list(PROMPTS), default=list(PROMPTS))
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--skip-acceptance", action="store_true", help="measure times and rates alone")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def step_rows(runner: Runner) -> list[ResultRow]:
    """Return the seconds of a forward pass of one answer by its rows; a draft's tokens have one each."""
    rows = []
    for context in CONTEXTS:
        chunks = [_drafted(context, num_rows - 1) for num_rows in NUM_ROWS]
        taken: list[list[float]] = [[] for _ in chunks]
        for _ in range(NUM_STEPS):
            for chunk, seconds in zip(chunks, taken, strict=True):
                start = time.perf_counter()
                runner.forward([chunk])
                seconds.append(time.perf_counter() - start)
        medians = [statistics.median(seconds) for seconds in taken]
        for num_rows, median in zip(NUM_ROWS, medians, strict=True):
            params = {"rows": num_rows, "context": context}
            rows.append(ResultRow("step", median * 1e3, "ms", params, None, "one row", medians[0] * 1e3))
            _log.info("a step of %d rows after %d tokens: %.2f ms", num_rows, context, median * 1e3)
    return rows


def drafting_rows(drafting: Drafting) -> list[ResultRow]:
    """Return the seconds that a head takes for drafts of one answer, by their length."""
    rows = []
    chunk = _drafted(DRAFT_CONTEXT, 0)
    drafting.drafter.forget_blocks([BlockId(block) for block in chunk.sequence.blocks])
    drafting.runner.forward([ScheduledChunk(chunk.sequence, 0, DRAFT_CONTEXT - 1)])
    for length in LENGTHS:
        seconds = []
        for _ in range(NUM_STEPS):
            start = time.perf_counter()
            drafting.drafter.propose([chunk.sequence], [length])
            seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds)
        rows.append(ResultRow("drafting", median * 1e3, "ms", {"k": length, "context": DRAFT_CONTEXT}))
        _log.info("a head's draft of %d tokens: %.2f ms", length, median * 1e3)
    return rows


def _drafted(context: int, num_drafted: int) -> ScheduledChunk:
    """Return the decode of a sequence of so many tokens, whose KV is whatever the first blocks hold."""
    sampling = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0)
    sequence = EngineSequence(RequestId("timed"), [5] * (context - 1), sampling)
    sequence.tokens.append(5)
    sequence.blocks.extend(range(context // 16 + 2))
    return ScheduledChunk(sequence, context - 1, 1, Draft((5,) * num_drafted))


def acceptance_rows(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    backend: Backend,
    prompts: dict[str, Ids],
    drafters: Sequence[str],
) -> list[ResultRow]:
    rows = []
    for kind, asked in prompts.items():
        plain = run(Engine(replace(settings, speculate="off"), checkpoint, backend), asked, kind)
        for drafter in drafters:
            for length in LENGTHS:
                chosen = replace(settings, speculate=drafter, draft_tokens=length, adapts_drafts=False)
                found = run(Engine(chosen, checkpoint, backend), asked, kind)
                assert found.answers == plain.answers, f"answers of {kind} are others with {drafter} at {length}"
                params = {"drafter": drafter, "k": length, "text": kind}
                share = found.num_drafts / found.num_decoded * found.accepted_length
                rows.append(ResultRow("accepted length", found.accepted_length, "tokens", params))
                rows.append(ResultRow("tokens from drafted steps", min(1.0, share), "share", params))
                _log.info("%s, %s, k=%d: %.2f tokens a draft", kind, drafter, length, found.accepted_length)
    return rows


def rate_rows(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    backend: Backend,
    prompts: dict[str, Ids],
    rounds: int,
    length: int,
    drafters: Sequence[str],
) -> list[ResultRow]:
    """Return tokens per second of one answer at a time and of 16, medians over rounds that take turns."""
    engines = {name: Engine(replace(settings, speculate=name, draft_tokens=length), checkpoint, backend)
               for name in ("off", *drafters)}  # fmt: skip
    mixed = [prompt for kind in zip(*prompts.values(), strict=True) for prompt in kind][:NUM_STREAMS]
    seen: dict[tuple[str, int, str], list[float]] = {}
    for index in range(rounds + 1 if rounds else 0):  # the first warms up
        for kind, asked in [*prompts.items(), ("all kinds", mixed)]:
            num_streams = NUM_STREAMS if kind == "all kinds" else 1
            answers: dict[str, Ids] = {}
            for name, engine in engines.items():
                # A salt of each round: no drafter may know the answers from the round before.
                found = run(engine, asked, f"{kind} {index}", num_streams)
                answers[name] = found.answers
                if index:
                    seen.setdefault((kind, num_streams, name), []).append(found.rate)
                _log.info("round %d, %s, %s: %.1f tokens/s", index, kind, name, found.rate)
            assert len(set(map(str, answers.values()))) == 1, f"answers of {kind} differ"
    medians = {key: statistics.median(rates) for key, rates in seen.items()}
    return [
        ResultRow(
            f"decode, {streams} stream{'s' if streams > 1 else ''}", rate, "tokens/s",
            {"drafter": name, "k": length, "text": kind}, None, PEER, medians[kind, streams, "off"],
        )
        for (kind, streams, name), rate in medians.items() if name != "off"
    ]  # fmt: skip


def run(engine: Engine, prompts: Ids, salt: str, num_streams: int = NUM_STREAMS) -> Answered:
    """Answer all prompts, so many at a time."""
    before = engine.stats()
    answers: Ids = []
    num_steps = num_decoded = 0
    decode_s = 0.0
    for first in range(0, len(prompts), num_streams):
        names = [RequestId(str(next(_names))) for _ in prompts[first : first + num_streams]]
        sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=0, temperature=0.0)
        for name, prompt in zip(names, prompts[first:], strict=False):
            engine.submit(EngineRequest(name, prompt, sampling, cache_salt=salt))
        told: dict[RequestId, list[int]] = {name: [] for name in names}
        while engine.has_work():
            start = time.perf_counter()
            output = engine.step()
            if output.num_decode_tokens and not output.num_prefill_tokens:
                num_steps, num_decoded = num_steps + 1, num_decoded + output.num_decode_tokens
                decode_s += time.perf_counter() - start
            for sampled in output.sampled:
                told[sampled.request_id].append(sampled.token.token_id)
        answers += told.values()
    after = engine.stats()
    num_accepted = sum(after.num_accepted_by_place) - sum(before.num_accepted_by_place)
    return Answered(answers, num_steps, after.num_drafts - before.num_drafts, num_accepted, decode_s, num_decoded)


if __name__ == "__main__":
    main()
