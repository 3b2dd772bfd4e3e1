"""The benchmark that kills either side of a pair in the middle of handoffs, again and again.

It checks what the survivor answers, alone and with a new peer, and what its pages hold. Three kinds of difference are
told apart. Pages: those that prefill computed against those that decode holds when the answer ends. Missing tokens: a
killed prefill may take token 0 with it. Differing tokens: in bf16 and FP8 an answer depends on what is computed beside
it, in float32 it does not; answers of an undisturbed pair show how often that happens.
"""

import json
import logging
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from bench.handoff.core import CoreSpec
from bench.handoff.front import Answers, CoreHandle, ask, prompt
from bench.report.result import ResultRow
from contracts.ids import Epoch, RequestId
from contracts.request import Cancel
from worker.messages import Work

NUM_TOKENS = 16
NUM_UNDISTURBED = 5
SIDES = ("prefill", "decode")
WHENS = ("undisturbed", "struck", "survivor alone", "new peer")
_log = logging.getLogger(__name__)

Sums = Sequence[Sequence[int]]


def lacking(found: Mapping[int, int], num_tokens: int) -> list[int]:
    return [index for index in range(num_tokens) if index not in found]


def others(found: Mapping[int, int], wanted: Mapping[int, int]) -> list[int]:
    return [index for index in sorted(found) if found[index] != wanted.get(index)]


def wrong_pages(computed: Sums, kept: Sums) -> list[int]:
    return [page for page, sums in enumerate(computed) if sums != kept[page]]


@dataclass
class KillReport:
    """The outcome of the kills of one side.

    `faults` are of the transfer or of the survivor; `others` are answers that differ, which rounding may explain.
    """

    victim: str
    num_kills: int = 0
    num_good: int = 0
    num_under_way: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    equal: Counter[str] = field(default_factory=Counter)
    lacking: Counter[str] = field(default_factory=Counter)
    unordered: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def answer(self, when: str, found: Mapping[int, int], wanted: Mapping[int, int], is_in_order: bool = True) -> None:
        """Compare an answer as far as it came; `is_in_order` says whether its tokens came in order."""
        differing, missing = others(found, wanted), lacking(found, max(found, default=-1) + 1)
        self.answers[when] += 1
        self.lacking[when] += bool(missing)
        self.unordered[when] += not is_in_order
        self.equal[when] += not differing
        if differing:
            self.others.append(f"{when}: from token {differing[0]} on, {len(differing)} of {len(found)}")

    def add(self, other: "KillReport") -> None:
        """Add the report of another pair that lost the same side."""
        for name, value in vars(other).items():
            if name != "victim":
                setattr(self, name, getattr(self, name) + value)


def kills(base: CoreSpec, devices: Sequence[str], seconds: float, num_lanes: int) -> list[ResultRow]:
    """Kill one side again and again for `seconds` after all cores have started.

    `num_lanes` pairs run at once for each side that is killed.
    """
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(SIDES) * num_lanes) as pool:
        folders = {victim: Path(name) / victim for victim in SIDES}
        lanes: list[Future[KillReport]] = []
        for victim, folder in folders.items():
            folder.mkdir()
            specs = {
                side: msgspec.structs.replace(base, device=device, kv_cache_gib=1, sums=str(folder))
                for side, device in zip(SIDES, devices, strict=True)
            }
            for lane in range(num_lanes):
                lanes.append(pool.submit(kill_rounds, specs, victim, lane, seconds))
        tolls = {victim: KillReport(victim) for victim in SIDES}
        for toll in (lane.result() for lane in lanes):
            tolls[toll.victim].add(toll)
        return [row for victim in SIDES for row in rows_of(tolls[victim], read_sums(folders[victim]))]


def rows_of(toll: KillReport, sums: Mapping[tuple[str, str], Sums]) -> list[ResultRow]:
    victim = {"victim": toll.victim}
    under_way = {"without a token when it came": toll.num_under_way, "faults": toll.faults[:5]}
    rows = [ResultRow("handoff_kills_survived", toll.num_good, "kills", victim | under_way, limit=toll.num_kills)]
    rows.append(pages_row(victim, sums))
    for when in WHENS:
        others = [note for note in toll.others if note.startswith(when)]
        heard = {"lacking": toll.lacking[when], "heard in another order": toll.unordered[when]}
        params = victim | {"when": when} | heard | {"others": others[:5]}
        rows.append(ResultRow("handoff_answers_equal", toll.equal[when], "answers", params, limit=toll.answers[when]))
    return rows


def pages_row(victim: Mapping[str, str], sums: Mapping[tuple[str, str], Sums]) -> ResultRow:
    """Return how many handoffs, of those whose answers decode has ended, have the right pages."""
    kept = {name: sums for (name, what), sums in sums.items() if what == "kept"}
    wrong = {name: wrong_pages(sums[name, "computed"], kept[name]) for name in kept}
    num_pages = sum(len(sums[name, "computed"]) for name in kept)
    params = {**victim, "pages": num_pages, "wrong": [(name, pages) for name, pages in wrong.items() if pages][:5]}
    return ResultRow(
        "handoff_pages_right", sum(not pages for pages in wrong.values()), "handoffs", params, limit=len(kept)
    )


def read_sums(folder: Path) -> dict[tuple[str, str], Sums]:
    """Return (request, "computed" or "kept") -> the checksums of its pages.

    The last line of a file is left out, since a core may have been killed while writing it.
    """
    found = {}
    for file in folder.iterdir():
        *lines, _ = file.read_text().split("\n")
        for line in lines:
            request_id, what, sums = json.loads(line)
            found[request_id, what] = sums
    return found


def kill_rounds(specs: Mapping[str, CoreSpec], victim: str, lane: int, seconds: float) -> KillReport:
    """Run rounds with a pair of small models: prompts in flight, one side killed, a new one in its place.

    Return the report of all rounds.
    """
    rng, answers = np.random.default_rng(lane), Answers()
    cores = {name: CoreHandle(name, spec, answers) for name, spec in specs.items()}
    spare = CoreHandle(victim, specs[victim], answers)
    try:
        for core in (*cores.values(), spare):
            core.wait_ready()
        longest = 8 * specs[victim].max_batched_tokens
        lengths = (longest, longest, longest * 5 // 8 - 120, longest)
        rounds = Rounds(cores, answers, [prompt(rng, length) for length in lengths], KillReport(victim))
        rounds.begin()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            rounds.strike(spare, rng.uniform(0.002, rounds.span_s))
            spare = CoreHandle(victim, specs[victim], answers)
    finally:
        for core in (*cores.values(), spare):
            core.kill()
    return rounds.toll


class Rounds:
    """The rounds of one pair.

    `span_s` is the time from posting the prompts until decode has given a token of each.
    """

    def __init__(
        self, cores: dict[str, CoreHandle], answers: Answers, prompts: Sequence[list[int]], toll: KillReport
    ) -> None:
        self._cores, self._answers, self._prompts = cores, answers, prompts
        self._expected: list[dict[int, int]] = []
        self.toll, self.span_s = toll, 0.0

    def begin(self) -> None:
        """Find the right answer to each prompt, by one worker alone, then run the pair undisturbed."""
        self._expected = [self._alone(self._cores["prefill"], ids) for ids in self._prompts]
        spans = []
        for _ in range(NUM_UNDISTURBED):
            began = time.perf_counter()
            names = self._by_pair("undisturbed")
            spans.append(max(self._answers.times(name)[1] for name in names) - began)
        self.span_s = statistics.median(spans)

    def strike(self, spare: CoreHandle, after_s: float) -> None:
        """Kill one side `after_s` after the prompts were posted, between the first chunk and the last Commit."""
        victim = self.toll.victim
        survivor = self._cores["decode" if victim == "prefill" else "prefill"]
        num_faults = len(self.toll.faults)
        names = self._ask()
        time.sleep(after_s)
        self._cores[victim].kill()
        self.toll.num_kills += 1
        self.toll.num_under_way += sum(not self._answers.tokens[name] for name in names)
        self._cores[victim] = spare
        try:
            self._without_peer(survivor, names)
            spare.wait_ready()
            self._by_pair("new peer")
            self._wait_clean(survivor)
        except TimeoutError as error:
            self.toll.faults.append(str(error))
        self.toll.num_good += len(self.toll.faults) == num_faults
        _log.info("%s killed after %.3f s of %.3f: %s", victim, after_s, self.span_s, self.toll.faults[num_faults:])

    def _without_peer(self, survivor: CoreHandle, struck: Sequence[str]) -> None:
        """Check what the survivor serves alone, while it notices the loss and afterwards."""
        for ids, wanted in zip(self._prompts[:2], self._expected[:2], strict=True):
            self.toll.answer("survivor alone", self._alone(survivor, ids), wanted)
        for name in struck:
            survivor.send(Work([Cancel(RequestId(name), Epoch(1), "its other worker is gone")], time.monotonic()))
        self._judge("struck", struck)

    def _by_pair(self, when: str) -> list[str]:
        names = self._ask()
        self._wait(names)
        self._judge(when, names)
        return names

    def _judge(self, when: str, names: Sequence[str]) -> None:
        """Compare those answers of which there is at least one token."""
        for name, wanted in zip(names, self._expected, strict=True):
            if found := self._answers.ids(name):
                self.toll.answer(when, found, wanted, self._answers.is_heard_in_order(name))

    def _ask(self) -> list[str]:
        pair = self._cores["prefill"], self._cores["decode"]
        return [ask(*pair, ids, NUM_TOKENS)[0] for ids in self._prompts]

    def _alone(self, core: CoreHandle, ids: list[int]) -> dict[int, int]:
        name, _ = ask(core, core, ids, NUM_TOKENS)
        self._wait([name])
        return self._answers.ids(name)

    def _wait(self, names: Sequence[str]) -> None:
        self._answers.wait(names, 60)
        ends = [self._answers.ends[name] for name in names]
        self.toll.faults += [end for end in ends if end != "finished"]

    def _wait_clean(self, survivor: CoreHandle) -> None:
        deadline = time.monotonic() + 5
        while not (survivor.status and survivor.status.is_clean):
            if time.monotonic() > deadline:
                raise TimeoutError("pages or requests are not given back")
            time.sleep(0.05)
