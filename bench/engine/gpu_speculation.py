"""The benchmark of verifying drafts on a GPU, beside the plain decode step of the same run.

`python -m bench.engine.gpu_speculation [--out FILE] [--batches 1 8 32 64] [--acceptance 2.8]`

Random weights in Llama-8B's shape, FP8. A round is a step in which each answer has k drafted tokens, and the host's
work between two of them: a drafted step waits for the tokens of the one before, a plain one is launched ahead. Random
weights foretell nothing, so acceptance is synthetic: as many tokens are kept, whatever they are, as give the stated
length on average, the step's own token included. What a drafter takes is not in a round, but in those of an EAGLE3
head of Llama-8B's shape (`engine_head_round`), whose weights are random too. `engine_adaptive_step` is the plain step
of an engine that looks for drafts (suffix) in texts that have none.
"""

import argparse
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from msgspec import structs

from bench.engine.gpu import NUM_STEPS, NUM_WARM, PROMPT, answering, idle_share, load, random_requests, settled
from bench.models.random_head import save_random_head
from bench.report.result import ResultRow, shown, write_result
from engine.engine import Engine
from engine.sequence import Sequence as EngineSequence
from engine.speculative.choice import PROPOSERS
from engine.speculative.proposer import Draft
from kernels import caps
from kernels.timing import eager_us

MOST_TOKENS = 4 * (NUM_WARM + NUM_STEPS) + 400
PEER = "the plain decode step of the same engine"
_log = logging.getLogger(__name__)


class RandomProposer:
    """Drafts of `length` random tokens, made before."""

    length = 3

    def __init__(self) -> None:
        tokens = np.random.default_rng(3).integers(0, 100_000, (1024, 3)).tolist()
        self._drafts = cycle([Draft(tuple(each)) for each in tokens])

    def propose(self, sequences: Sequence[EngineSequence], num_tokens: Sequence[int]) -> list[Draft]:
        return [next(self._drafts).first(min(self.length, number)) for number in num_tokens]

    def end_sequence(self, sequence: EngineSequence) -> None:
        """Nothing was kept of it."""


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--acceptance", type=float, default=2.8, help="tokens that a step with a draft gives")
    args = parser.parse_args()
    PROPOSERS["random"] = RandomProposer
    rows: list[ResultRow] = []
    engine = loaded("random", adapts_drafts=False, synthetic_acceptance=args.acceptance)
    with settled(engine):
        for batch in args.batches:
            rows += measured(engine, batch, args.acceptance)
    plain = {row.params["batch"]: row.value for row in rows if row.name == "engine_plain_step"}
    engine = loaded("suffix", adapts_drafts=True)
    with settled(engine):
        for batch in args.batches:
            step_ms = rounds(engine, batch, speculate=True).ms
            rows.append(
                shown(ResultRow("engine_adaptive_step", step_ms, "ms", {"batch": batch}, None, PEER, plain[batch]))
            )
    rows += head_rows(args.batches, args.acceptance, plain)
    config = {"model": "llama-8b's shape, random weights, float8", "card": caps.detect().name, "prompt": PROMPT}
    path = write_result(args.out, "engine-gpu-speculation", rows, config)
    _log.info("%s", path.with_suffix(".md").read_text(encoding="utf-8"))


def loaded(drafter: str, **drafting: bool | float) -> Engine:
    """Return an engine of random weights that drafts so."""
    limits = {"max_model_len": 2048, "max_num_seqs": 64, "kv_cache_nbytes": 16 << 30}
    return load("float8", "llama-8b", speculate=drafter, **drafting, **limits)


def measured(engine: Engine, batch: int, acceptance: float) -> list[ResultRow]:
    """Return the plain step, then rounds of each length of draft, with their synthetic acceptance."""
    plain = rounds(engine, batch, speculate=False)
    rows = [shown(ResultRow("engine_plain_step", plain.ms, "ms", {"batch": batch}))]
    rows.append(shown(ResultRow("engine_plain_rate", plain.rate / batch, "tokens/s/user", {"batch": batch})))
    rows.append(shown(ResultRow("engine_plain_idle", plain.idle, "", {"batch": batch})))
    plain_graph = graph_ms(engine, batch)
    rows.append(shown(ResultRow("engine_plain_graph", plain_graph, "ms", {"batch": batch})))
    for length in (1, 2, 3):
        RandomProposer.length = length
        kept = min(acceptance, 1.0 + length)
        params = {"batch": batch, "drafted": length, "synthetic acceptance": kept}
        drafted = rounds(engine, batch, speculate=True)
        rows.append(ResultRow("engine_round", drafted.ms, "ms", params, None, PEER, plain.ms))
        rows.append(ResultRow("engine_round_idle", drafted.idle, "", params, None, PEER, plain.idle))
        graph = graph_ms(engine, batch * (1 + length))
        rows.append(ResultRow("engine_round_graph", graph, "ms", params, None, PEER, plain_graph))
        rows.append(
            ResultRow(
                "engine_round_rate", drafted.rate / batch, "tokens/s/user", params, None, PEER, plain.rate / batch
            )
        )
        for row in rows[-4:]:
            shown(row)
    return rows


def head_rows(batches: Sequence[int], acceptance: float, plain: Mapping[int, float]) -> list[ResultRow]:
    """Return rounds of three tokens that a head drafts, and what its passes take.

    `plain`: milliseconds of a plain step by batch.
    """
    rows: list[ResultRow] = []
    with TemporaryDirectory() as folder:
        head = str(save_random_head(Path(folder)))
        engine = loaded(head, adapts_drafts=False, synthetic_acceptance=acceptance)
        with settled(engine):
            for batch in batches:
                params = {"batch": batch, "drafted": 3, "synthetic acceptance": acceptance}
                drafted = rounds(engine, batch, speculate=True)
                found = {"draft": drafted_ms(engine, batch), "read": read_ms(engine, 4 * batch)}
                rows.append(ResultRow("engine_head_round", drafted.ms, "ms", params, None, PEER, plain[batch]))
                rows.append(ResultRow("engine_head_round_idle", drafted.idle, "", params))
                rows.append(ResultRow("engine_head_round_rate", drafted.rate / batch, "tokens/s/user", params))
                rows += [ResultRow(f"engine_head_{name}", ms, "ms", params) for name, ms in found.items()]
                for row in rows[-5:]:
                    shown(row)
    return rows


def drafted_ms(engine: Engine, num_answers: int) -> float:
    """Return the milliseconds of three drafts of so many answers, without the host."""
    passes = engine.runner.launcher.head  # type: ignore[attr-defined]
    return eager_us(partial(passes.drafts.draft, num_answers, 3), count=10, groups=5) / 1e3


def read_ms(engine: Engine, num_rows: int) -> float:
    """Return the milliseconds in which the head reads so many rows of a step, without the host."""
    passes = engine.runner.launcher.head  # type: ignore[attr-defined]
    return eager_us(partial(passes.read_step, num_rows), count=10, groups=5) / 1e3


@dataclass(frozen=True)
class Round:
    """Milliseconds of a step, tokens a second of all answers, and the share that the GPU is idle."""

    ms: float
    rate: float
    idle: float


def rounds(engine: Engine, batch: int, speculate: bool) -> Round:
    """Return what steps with this many answers take and give."""
    requests = [
        replace(request, sampling=structs.replace(request.sampling, speculate=speculate))
        for request in random_requests(engine, [PROMPT] * batch, MOST_TOKENS)
    ]
    with answering(engine, requests):
        num_tokens, begin = 0, time.perf_counter()
        for _ in range(NUM_STEPS):
            num_tokens += len(engine.step().sampled)
        span_s = time.perf_counter() - begin
        idle = idle_share(engine)
    return Round(span_s / NUM_STEPS * 1e3, num_tokens / span_s, idle)


def graph_ms(engine: Engine, num_rows: int) -> float:
    """Return the milliseconds of the captured step of so many rows, without the host."""
    held = engine.runner.launcher.steps.held(num_rows, PROMPT + MOST_TOKENS)  # type: ignore[attr-defined]
    return eager_us(held, count=10, groups=5) / 1e3


if __name__ == "__main__":
    main()
