"""The loads of bench.serving.gpu on simulated workers, a pair or a single one, event by event.

python -m bench.serving.simulated_pair [--seeds 0 1 2] [--floors 0.8 0.5 0] [--out FILE]

Placement's policy, the engine's scheduler and its budget beside answers are the real ones. What a step takes is
interpolated between measurements on an H200, and arrivals are those that bench.serving.gpu makes of the same seed; the
result file names them. There is no jitter: the host, the network and the transfer cost what they cost in the mean. Of a
system that was measured the measured figure stands beside the simulated one, seed by seed; else rows are of all seeds.
Chunks that follow the load are simulated with several floors of their pace: see MixedBudget's MIN_SPEED.
"""

import argparse
import heapq
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from bench.load.generator import percentile
from bench.report.result import ResultRow, write_result
from bench.serving.loads import GAP_S, LOADS, Load
from bench.serving.step_costs import ALONE, BOUND_EACH_LAYER, BOUND_ONCE, MIXED, ServedHost, StepCosts, rows_in
from contracts.ids import Incarnation, RequestId, WorkerId
from contracts.node import WorkerRole
from contracts.sampling import SamplingParams
from coordinator.placement import policy
from coordinator.placement.candidate import Candidate
from engine.cache.block_pool import BlockPool
from engine.scheduler import mixed_budget
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_limits import SchedulerLimits
from engine.sequence import Sequence
from worker.core.status import FULL_TOKENS, Rate

SERVED = "2026-11-28-serving-gpu-beside-vllm-2xh200"
SINGLE = "2026-11-29-serving-gpu-adaptive-h200"
LOAD_NAMES = ("8k-8", "8k-4", "1k-40", "1k-20")
BLOCK, CAPACITY_TOKENS = 64, 2_079_000
LAUNCH_S = 0.0015
"""The host's time before a step, from the files' host work: who lands later waits for the step behind."""
HEARTBEAT_S = 1.0
WARM_S = 3.0
"""When the load begins: one request before it gives the workers their rates, as bench.serving.gpu does."""

SHOWN = ("TTFT p50", "TTFT p90", "TTFT p99", "ITL p99", "goodput", "prompts sent over")
"""The figures of all seeds that the result file has; of a seed that was measured it has all."""

log = logging.getLogger("bench")


@dataclass(frozen=True)
class SimulatedSystem:
    """A way to serve.

    `spills`: the second worker may take prompts. `objective_s`: see SchedulerLimits. `measured_as`: its name in SERVED.
    `is_single`: there is no prefill worker. `host`: what a step takes beside the device.
    """

    name: str
    role: WorkerRole
    objective_s: float
    spills: bool = True
    measured_as: str = ""
    is_single: bool = False
    host: ServedHost = BOUND_ONCE


SYSTEMS = (
    SimulatedSystem("pair, chunks of 1024, nothing sent over", WorkerRole.DECODE, 0.0, False, "pair"),
    SimulatedSystem("shared, chunks of 1024", WorkerRole.MIXED, 0.0, True, "shared"),
    SimulatedSystem("shared, chunks that follow", WorkerRole.MIXED, 0.008),
    SimulatedSystem("pair that follows the load", WorkerRole.DECODE, 0.008),
    SimulatedSystem("one mixed worker, chunks of 1024", WorkerRole.MIXED, 0.0, is_single=True),
    SimulatedSystem("one mixed worker, chunks that follow", WorkerRole.MIXED, 0.008, is_single=True),
    SimulatedSystem(
        "one mixed worker, chunks of 1024, bound layer by layer", WorkerRole.MIXED, 0.0, is_single=True,
        host=BOUND_EACH_LAYER,
    ),
)  # fmt: skip


def _measured(system: str, load_name: str) -> list[dict[str, Any]]:
    wanted = {"system": system, "load": load_name}
    return [row for row in rows_in(SERVED) if wanted.items() <= row["params"].items()]


def _measured_figures(system: SimulatedSystem, load_name: str, seed: int) -> dict[str, float]:
    """Return what was measured with a seed.

    Of two cards seed 0 alone was; of one card, the fixed chunk stands as the peer.
    """
    if system.host is BOUND_EACH_LAYER:
        wanted = {"load": load_name, "seed": seed}
        return {row["name"]: row["peer_value"] for row in rows_in(SINGLE) if wanted.items() <= row["params"].items()}
    return {row["name"]: row["value"] for row in _measured(system.measured_as, load_name)} if seed == 0 else {}


@dataclass
class Answer:
    """One request, with the times at which its client had tokens."""

    asked_s: float
    num_in: int
    num_out: int
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        return [late - early for early, late in zip(self.token_s, self.token_s[1:], strict=False)]


class Clock:
    """Virtual time, and what happens then."""

    def __init__(self) -> None:
        self.now, self._order = 0.0, count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, due_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(due_s, self.now), next(self._order), what))

    def run(self) -> None:
        while self._due:
            self.now, _, what = heapq.heappop(self._due)
            what()


class SimulatedWorker:
    """An engine's loop in virtual time: a step is launched while the one before is computed.

    It waits with the launch for whoever may land, as the engine core does: until there is just time enough.
    """

    def __init__(self, clock: Clock, name: str, role: WorkerRole, costs: StepCosts, objective_s: float) -> None:
        self.name, self.role, self._clock, self._costs = name, role, clock, costs
        pool = BlockPool(CAPACITY_TOKENS // BLOCK, BLOCK, False)
        rows = tuple(range(64, 2049, 64))
        self._limits = SchedulerLimits(256, 2048, 1024, rows, objective_s)
        self.scheduler = Scheduler(pool, self._limits)
        self._pool = pool
        self._rates, self.reported = (Rate(), Rate()), (0.0, 0.0, 1024)
        self._device_free_s, self._next_s = 0.0, math.inf
        self.num_reserved = self.num_answers = self.num_decodes = 0
        self.pending: dict[RequestId, int] = {}
        self.on_started: Callable[[Sequence], None] = lambda _: None
        self.on_token: Callable[[Sequence], None] = lambda _: None
        self.num_prompt_tokens = 0

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
        self._wake()

    def land(self, sequence: Sequence) -> None:
        """Go on with an answer whose KV is here."""
        self.num_reserved -= 1
        sequence.blocks.extend(self._pool.allocate(-(-len(sequence.tokens) // BLOCK)))
        self.scheduler.resume(sequence)
        self._wake()

    def report(self) -> None:
        self.reported = (*(rate.value for rate in self._rates), self._prompt_tokens())

    def candidate(self) -> Candidate:
        """Return this worker as placement sees it, by the last heartbeat and the counts of now."""
        prefill_rate, decode_rate, prompt_tokens = self.reported
        return Candidate(
            worker_id=WorkerId(self.name), incarnation=Incarnation(self.name), role=self.role, layout_id="l",
            send_words=frozenset("l"), receive_words=frozenset("l"), max_model_len=10_000,
            capacity_tokens=CAPACITY_TOKENS, prompt_tokens_per_mixed_step=prompt_tokens,
            bounds_gaps=self.scheduler.mixed_budget.has_objective,
            pending_tokens=sum(self.pending.values()), num_decodes=self.num_decodes, num_answers=self.num_answers,
            prefill_rate=prefill_rate, decode_rate=decode_rate, transfer_rate=2e6,
        )  # fmt: skip

    def _prompt_tokens(self) -> int:
        running = sum(sequence.is_decoding for sequence in self.scheduler.running)
        return self.scheduler.mixed_budget.prompt_tokens(running, 0)

    def _wake(self) -> None:
        if self._next_s == math.inf:
            self._schedule(self._clock.now)

    def _schedule(self, due_s: float) -> None:
        self._next_s = due_s
        self._clock.at(due_s, lambda: self._launch(due_s))

    def _launch(self, due_s: float) -> None:
        if due_s != self._next_s:
            return
        self._next_s = math.inf
        batch = self.scheduler.schedule(self.num_reserved)
        if not batch.chunks:
            return
        for sequence in batch.started:
            self.on_started(sequence)
        step_s = self._costs.step_s(batch)
        begins_s = max(self._clock.now + LAUNCH_S, self._device_free_s)
        ends_s = self._device_free_s = begins_s + step_s
        sampled = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        for chunk in batch.chunks:
            chunk.sequence.num_computed = chunk.end
        for sequence in sampled:
            sequence.tokens.append(1)
            if sequence.handoff or sequence.num_generated >= sequence.sampling.max_tokens:
                self.scheduler.remove(sequence)
                self._pool.release(sequence.blocks)
                del sequence.blocks[:]
        num_decode = sum(chunk.is_decode for chunk in batch.chunks)
        num_prompt = sum(chunk.num_tokens for chunk in batch.chunks) - num_decode
        attended = float(sum(chunk.num_tokens * chunk.first_token for chunk in batch.chunks if not chunk.is_decode))
        span_s = ends_s - begins_s
        self._clock.at(ends_s, lambda: self._complete(sampled, num_prompt, num_decode, span_s, attended))
        self._schedule(ends_s - LAUNCH_S if self.num_reserved else begins_s)

    def _complete(
        self, sampled: list[Sequence], num_prompt: int, num_decode: int, span_s: float, attended: float
    ) -> None:
        self.num_prompt_tokens += num_prompt
        self.scheduler.mixed_budget.record(num_prompt, num_decode, span_s, attended)
        least = min(FULL_TOKENS, self.scheduler.mixed_budget.prompt_tokens(num_decode, 0) // 2)
        self._rates[0].add(num_prompt, span_s, least)
        self._rates[1].add(num_decode, span_s)
        for sequence in sampled:
            self.on_token(sequence)
        self._wake()


class SimulatedPair:
    """A gateway, a prefill worker and one that decodes, under one load."""

    def __init__(self, system: SimulatedSystem, load: Load, costs: StepCosts, seed: int) -> None:
        self._clock, self._system = Clock(), system
        self._prefill = SimulatedWorker(self._clock, "prefill-0", WorkerRole.PREFILL, costs, system.objective_s)
        self._decode = SimulatedWorker(self._clock, "second", system.role, costs, system.objective_s)
        self._over_s, self._handoff_s = _overheads_s(load.name)
        self.answers: list[Answer] = []
        self._of: dict[RequestId, Answer] = {}
        for worker in (self._prefill, self._decode):
            worker.on_token = lambda sequence, worker=worker: self._on_token(worker, sequence)
        self._prefill.on_started = self._on_started
        point, due_s = load.point, WARM_S
        assert point.rate is not None
        random = Random(f"{seed} {point} arrivals")
        for number in range(point.num_requests):
            answer = Answer(due_s, point.lengths.num_in, point.lengths.num_out)
            self.answers.append(answer)
            self._clock.at(due_s + self._over_s, lambda number=number, answer=answer: self._place(number, answer))
            due_s += random.expovariate(point.rate)
        warm = Answer(0.0, point.lengths.num_in, 16)
        self._clock.at(0.0, lambda: self._place(-1, warm))
        self._num_left = point.num_requests + 1

    def run(self) -> float:
        """Return the seconds until all is answered."""
        self._clock.at(0.0, self._beat)
        self._clock.run()
        return max(answer.token_s[-1] for answer in self.answers) - WARM_S

    @property
    def share_sent_over(self) -> float:
        total = self._prefill.num_prompt_tokens + self._decode.num_prompt_tokens
        return self._decode.num_prompt_tokens / total

    def _beat(self) -> None:
        for worker in (self._prefill, self._decode):
            worker.report()
        if self._num_left:
            self._clock.at(self._clock.now + HEARTBEAT_S, self._beat)

    def _place(self, number: int, answer: Answer) -> None:
        need = policy.decode_need(answer.num_in, answer.num_out)
        workers = [self._decode] if self._system.is_single else [self._prefill, self._decode]
        pool = [worker.candidate() for worker in workers]
        offers = policy.choose(pool, answer.num_in, need)
        if not self._system.spills:
            offers = [offer for offer in offers if offer.prefill.worker_id != offer.decode.worker_id]
        route = offers[0]
        request_id = RequestId(f"r{number}")
        self._of[request_id] = answer
        is_local = route.prefill.worker_id == route.decode.worker_id
        worker = self._decode if is_local else self._prefill
        worker.pending[request_id] = answer.num_in
        self._decode.num_decodes += 1
        sampling = SamplingParams(max_tokens=answer.num_out, seed=0)
        # Tokens that no other prompt begins with.
        sequence = Sequence(request_id, [number] * answer.num_in, sampling, handoff=not is_local)
        worker.add(sequence)

    def _on_started(self, sequence: Sequence) -> None:
        self._decode.num_reserved += 1

    def _on_token(self, worker: SimulatedWorker, sequence: Sequence) -> None:
        answer = self._of[sequence.request_id]
        answer.token_s.append(self._clock.now)
        if len(answer.token_s) == 1:
            worker.pending.pop(sequence.request_id)
            self._decode.num_answers += 1
        if worker is self._prefill:
            landed = Sequence(sequence.request_id, sequence.tokens[:-1], sequence.sampling)
            landed.tokens.append(1)
            landed.num_computed = landed.num_prompt
            self._clock.at(self._clock.now + self._handoff_s, lambda: self._decode.land(landed))
        if len(answer.token_s) == answer.num_out:
            self._num_left -= 1
            self._decode.num_decodes -= 1
            self._decode.num_answers -= 1


def _overheads_s(load_name: str) -> tuple[float, float]:
    """Return the mean seconds before a prompt is at its worker, and those of a handoff behind token 0."""
    rows = [row for row in _measured("pair", load_name) if row["unit"] == "ms"]
    found = {row["name"]: row["value"] / 1e3 for row in rows}
    return sum(found[f"mean {stage}"] for stage in ("receive", "prepare", "place")), found["mean exposed"]


def figures(load: Load, pairs: list[SimulatedPair], wall_s: float) -> Iterator[tuple[str, float, str]]:
    """Yield the figures of one system under one load, of all its seeds together."""
    answers = [answer for pair in pairs for answer in pair.answers]
    ttfts = [answer.ttft_s * 1e3 for answer in answers]
    gaps = [gap * 1e3 for answer in answers for gap in answer.gaps_s]
    for q in (50, 90, 99):
        yield f"TTFT p{q}", percentile(ttfts, q), "ms"
    for q in (50, 90, 99):
        yield f"ITL p{q}", percentile(gaps, q), "ms"
    yield "ITL longest", max(gaps), "ms"
    good = sum(a.ttft_s <= load.ttft_s and sum(a.gaps_s) / len(a.gaps_s) <= GAP_S for a in answers)
    yield "goodput", good / wall_s, "requests/s"
    yield "prompts sent over", sum(pair.share_sent_over for pair in pairs) / len(pairs), "of the tokens"


def simulated(system: SimulatedSystem, load: Load, costs: StepCosts, seeds: list[int]) -> list[ResultRow]:
    """Return the rows of a system under a load, of all seeds together and of each that was measured."""
    pairs = {seed: SimulatedPair(system, load, costs, seed) for seed in seeds}
    walls = {seed: pair.run() for seed, pair in pairs.items()}
    found: list[ResultRow] = []
    for seed, pair in pairs.items():
        if beside := _measured_figures(system, load.name, seed):
            found += _figure_rows(system, load, [pair], walls[seed], f"seed {seed}", beside)
    together = _figure_rows(system, load, list(pairs.values()), sum(walls.values()), "all seeds", {})
    return found + [row for row in together if row.name in SHOWN]


def _figure_rows(
    system: SimulatedSystem,
    load: Load,
    pairs: list["SimulatedPair"],
    wall_s: float,
    arrivals: str,
    measured: dict[str, float],
) -> list[ResultRow]:
    params: dict[str, Any] = {"system": system.name, "load": load.name, "arrivals": arrivals}
    if system.objective_s:
        params["floor"] = mixed_budget.MIN_SPEED
    rows = [ResultRow(name, value, unit, params, None, "measured" if name in measured else None, measured.get(name))
            for name, value, unit in figures(load, pairs, wall_s)]  # fmt: skip
    log.warning("%s: %s", ", ".join(map(str, params.values())), ", ".join(f"{r.name} {r.value:.4g}" for r in rows))
    return rows


def main() -> int:
    """Simulate each system under each load. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    words = "least pace of chunks that follow, as a share of the largest chunk's"
    parser.add_argument("--floors", type=float, nargs="+", default=[mixed_budget.MIN_SPEED, 0.5, 0.0], help=words)
    parser.add_argument("--out", type=Path, default=None, help="result file")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    rows = []
    for load in (load for name in LOAD_NAMES for load in LOADS if load.name == name):
        for system in SYSTEMS:
            costs = StepCosts(system.host)
            for floor in options.floors if system.objective_s else options.floors[:1]:
                mixed_budget.MIN_SPEED = floor
                rows += simulated(system, load, costs, options.seeds)
    config = {
        "seeds": options.seeds,
        "step costs": [MIXED, ALONE],
        "overheads": [SERVED, SINGLE],
        "arrivals": "bench.serving.gpu",
    }
    write_result(options.out, "simulated-pair", rows, config)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
