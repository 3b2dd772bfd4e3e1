"""A worker whose answers outgrow its KV while another has room: they move there, or are preempted."""

import asyncio
from dataclasses import dataclass

from bench.report.result import ResultRow
from bench.serving.migration.drain import DrainRun, requests_of, run_on_one
from bench.system.local_system import get_json, running

SETTINGS = {"TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "192", "TANDEM_MAX_NUM_SEQS": "80"}
"""Half of the KV that 32 answers of 264 tokens need: at 45 KiB a token, 372 MiB."""
PREEMPTED = "preemption: no migration for memory"


@dataclass(frozen=True)
class MemoryRun:
    """What became of the answers, and what it took."""

    answers: DrainRun
    num_moves: float
    num_preemptions: float
    num_computed_again: float
    """Tokens that were computed as prompts beyond those of the prompts."""


@dataclass(frozen=True)
class MemoryRuns:
    """The same requests with moves for memory and without, and with KV for all of them."""

    roomy: MemoryRun
    moved: MemoryRun
    preempted: MemoryRun

    @property
    def is_passed(self) -> bool:
        return not any(self.differences())

    def differences(self) -> tuple[list[str], list[str]]:
        """Return in words the answers that failed or are others, with moves and with preemption alone."""
        moved, preempted = (each.answers.differences(self.roomy.answers) for each in (self.moved, self.preempted))
        return moved, preempted

    def rows(self) -> list[ResultRow]:
        """Return the figures; those of preemption are the peers."""
        moved, preempted = self.moved, self.preempted
        num_answers = len(moved.answers.answers)
        num_half = num_answers // 2
        load = {"answers": num_answers, "KV MiB": SETTINGS["TANDEM_KV_CACHE_MIB"]}

        def row(name: str, value: float, peer: float, unit: str = "") -> ResultRow:
            return ResultRow(f"short of KV: {name}", value, unit, load, None, PREEMPTED, peer)

        gaps_s = [each.answers.longest_gaps_s for each in (moved, preempted)]
        wrong = [len(words) for words in self.differences()]
        return [
            row("moves", moved.num_moves, preempted.num_moves),
            row("preemptions", moved.num_preemptions, preempted.num_preemptions),
            row("tokens computed again", moved.num_computed_again, preempted.num_computed_again, "tokens"),
            row("longest gap of an answer, p50", gaps_s[0][num_half], gaps_s[1][num_half], "s"),
            row("longest gap of an answer, most", gaps_s[0][-1], gaps_s[1][-1], "s"),
            row("mean time of an answer", moved.answers.mean_time_s, preempted.answers.mean_time_s, "s"),
            row("answers that failed or are others", wrong[0], wrong[1]),
        ]


def measure_memory(num_answers: int, num_tokens: int) -> MemoryRuns:
    """Return the runs, each on a system of its own."""
    roomy = {"TANDEM_KV_CACHE_MIB": "1024"}
    return MemoryRuns(
        roomy=_measure(num_answers, num_tokens, SETTINGS | roomy),
        moved=_measure(num_answers, num_tokens, SETTINGS | {"TANDEM_MIGRATE_FOR": "drain,memory"}),
        preempted=_measure(num_answers, num_tokens, SETTINGS | {"TANDEM_MIGRATE_FOR": "drain"}),
    )


def _measure(num_answers: int, num_tokens: int, settings: dict[str, str]) -> MemoryRun:
    with running("--dtype", "float32", "--decode", "2", **settings) as system:
        requests = requests_of(system, num_answers, num_tokens)
        answers = asyncio.run(run_on_one(system, requests, None))
        decodes = [worker for worker in system.workers() if worker["role"] == "decode"]
        counters = [get_json(f"{worker['url']}/health")["core"]["counters"] for worker in decodes]
    names = "migrations_committed", "preemptions", "prefill_tokens"  # a decode worker computes no other prompts
    moves, preemptions, computed = (sum(each[name] for each in counters) for name in names)
    return MemoryRun(answers, moves, preemptions, computed)
