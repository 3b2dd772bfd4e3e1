"""The benchmark of running answers that move between two GPUs.

`python -m bench.handoff.migration [--lengths 8192 32768] [--beside 0 16] [--moves 150] [--check] [--out FILE]`

Answers to prompts of so many tokens go to and fro between two engine cores as bench.handoff.gpu has them, without HTTP
and gateway, while so many others run on each core. A pause lasts from the last token of the source to the first of the
destination, as a front hears them. Beside it stand the gaps of the same answers while they stay, and the first token of
a core that computes prompt and answer again, as a replay does. Random weights in Llama-8B's shape.

`--check`: the same in float32 with few layers, and each answer is also computed by a core that it never leaves: its
greedy tokens must be equal.
"""

import argparse
import gc
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.handoff.core import CoreSpec
from bench.handoff.front import Answers, CoreHandle, Heard, ask, cancel, config_of, greedy, meet, prompt
from bench.report.result import ResultRow, shown, write_result
from contracts.events import Failed, Moved, Tokens
from contracts.ids import Epoch, GatewayId, RequestId
from contracts.request import Job, Route
from worker.messages import Work

TOKENS = 1024
"""How long an answer that moves gets; the next one takes its place when few tokens are left."""
FEW, STAY = 256, 8
"""Tokens: with so few left an answer moves no more; so many it gets at each core before it moves again."""
BESIDE_TOKENS, BESIDE_MAX_TOKENS = 1024, 12000
WAIT_S = 60.0
_log = logging.getLogger(__name__)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--transfer", default="nvlink")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--beside", nargs="+", type=int, default=[0, 16], help="other answers on each core")
    parser.add_argument("--moves", type=int, default=150)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    config = config_of(args)
    rows: list[ResultRow] = []
    gc.disable()  # collecting among all received tokens takes longer than a pause
    with cores(args) as (first, second, answers):
        for num_beside in args.beside:
            with running(first, second, answers, num_beside):
                for length in args.lengths:
                    rounds = MigrationRounds((first, second), answers, length, args.check)
                    rounds.move(args.moves)
                    rows += [shown(row) for row in rounds.rows({"by": args.transfer, "others": num_beside})]
                    _log.info("%s", write_result(args.out, "gpu-migration", rows, config))


class MovingAnswers(Answers):
    """Answers of which a destination repeats what the source has said.

    A token counts when it is first heard. `num_contradicted`: repeated tokens that were others before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()
        self.failures: list[str] = []
        self.num_contradicted = 0

    def take(self, worker: str, event: Any, now: float) -> None:
        if isinstance(event, Tokens):
            for token in event.tokens:
                heard = Heard(now, worker, token.token_id)
                first = self.tokens[event.request_id].setdefault(token.index, heard)
                self.num_contradicted += first.token_id != token.token_id
        elif isinstance(event, Moved):
            self.moved[event.request_id] += 1
        elif isinstance(event, Failed) and event.epoch > 1:  # a migration, whose answer goes on
            self.failures.append(f"{event.code}: {event.message}")
        else:
            super().take(worker, event, now)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until it is so; raise TimeoutError if that takes longer than WAIT_S."""
        with self.changed:
            if not self.changed.wait_for(is_so, WAIT_S):
                raise TimeoutError(f"not within {WAIT_S:.0f} s; {self.failures[-3:]}")


@contextmanager
def cores(args: argparse.Namespace) -> Iterator[tuple[CoreHandle, CoreHandle, MovingAnswers]]:
    """Run two cores that know each other."""
    answers = MovingAnswers()
    base = CoreSpec(
        device="",
        num_layers=4 if args.check else 32,
        dtype="float32" if args.check else "float8",
        max_model_len=max(*args.lengths, BESIDE_TOKENS + BESIDE_MAX_TOKENS) + 2 * TOKENS,
        transfer=args.transfer,
    )
    started = [
        CoreHandle(name, msgspec.structs.replace(base, device=device), answers)
        for name, device in zip(("first", "second"), args.devices, strict=True)
    ]
    try:
        for core in started:
            core.wait_ready()
        meet(started[0], started[1])
        meet(started[1], started[0])
        yield started[0], started[1], answers
    finally:
        for core in started:
            core.kill()


@contextmanager
def running(first: CoreHandle, second: CoreHandle, answers: MovingAnswers, count: int) -> Iterator[None]:
    """Keep `count` answers running on each core while the block runs."""
    rng = np.random.default_rng(count)
    names = {
        core: [ask(core, core, prompt(rng, BESIDE_TOKENS), BESIDE_MAX_TOKENS, 300.0)[0] for _ in range(count)]
        for core in (first, second)
    }
    answers.until(lambda: all(len(answers.tokens[name]) > STAY for core in names for name in names[core]))
    yield
    ended = [name for core in names for name in names[core] if name in answers.ends]
    assert not ended, f"{len(ended)} answers beside ended: {answers.ends[ended[0]]}"
    for core in names:
        cancel(core, names[core])


class MigrationRounds:
    """Answers to prompts of `length` tokens, one after the other, that move between two cores."""

    def __init__(
        self, pair: tuple[CoreHandle, CoreHandle], answers: MovingAnswers, length: int, is_checked: bool
    ) -> None:
        self._pair, self._answers, self._length, self._is_checked = pair, answers, length, is_checked
        self._rng = np.random.default_rng(length)
        self._num_failed_before, self._num_contradicted_before = len(answers.failures), answers.num_contradicted
        self.pauses_s: list[float] = []
        self.steps_s: list[float] = []
        self.computed_s: list[float] = []
        self.num_moves = self.num_compared = self.num_different = 0

    def move(self, num_moves: int) -> None:
        """Move answers until so many moves were made or begun in vain."""
        while self.num_moves + self._num_failed() < num_moves:
            ids = prompt(self._rng, self._length)
            name = self._one_answer(ids, num_moves)
            self._keep_times(name)
            said = [token for _, token in sorted(self._answers.ids(name).items())]
            self.computed_s.append(self._first_token_s([*ids, *said]))
            if self._is_checked:
                self._compare(ids, said)

    def rows(self, params: dict[str, Any]) -> list[ResultRow]:
        """Return the figures of all moves."""
        params = {"tokens": self._length, **params}
        step_ms, again_ms = statistics.median(self.steps_s) * 1e3, statistics.median(self.computed_s) * 1e3
        rows = [
            ResultRow("moves", self.num_moves, "", params | {"failed": self._failures()}),
            ResultRow("step: gap of an answer that stays, p50", step_ms, "ms", params | _tail(self.steps_s)),
        ]
        for name, share in (("p50", 0.5), ("p99", 0.99), ("most", 1.0)):
            pause_ms = float(np.quantile(self.pauses_s, share)) * 1e3
            rows.append(
                ResultRow(f"pause, {name}", pause_ms, "ms", params, peer="computing it again", peer_value=again_ms)
            )
            rows.append(ResultRow(f"pause beyond one step, {name}", pause_ms - step_ms, "ms", params))
        contradicted = self._answers.num_contradicted - self._num_contradicted_before
        rows.append(ResultRow("tokens that the destination told otherwise", contradicted, "", params))
        if self._is_checked:
            compared = params | {"answers": self.num_compared}
            rows.append(ResultRow("answers with other tokens than without moves", self.num_different, "", compared))
        return rows

    def _one_answer(self, ids: list[int], num_moves: int) -> str:
        source, destination = self._pair
        name, _ = ask(source, source, ids, TOKENS, 300.0)
        epoch = Epoch(1)
        self._stay(name, source)
        while self.num_moves + self._num_failed() < num_moves and len(self._answers.ids(name)) < TOKENS - FEW:
            epoch = Epoch(epoch + 1)
            if self._is_moved(name, ids, epoch, source, destination):
                self.num_moves += 1
                source, destination = destination, source
            self._stay(name, source)
        cancel(source, [name], epoch)
        return name

    def _is_moved(self, name: str, ids: list[int], epoch: Epoch, source: CoreHandle, destination: CoreHandle) -> bool:
        """Post the migration as a gateway does, and wait for what becomes of it."""
        answers = self._answers
        num_moved, num_failed = answers.moved[name], len(answers.failures)
        said = [token for _, token in sorted(answers.ids(name).items())]
        route = Route(RequestId(name), epoch, source.ref, destination.ref)
        job = Job(
            route, GatewayId("bench"), [*ids, *said], greedy(TOKENS), 300.0, num_answered=len(said), is_migration=True
        )
        for core in self._pair:
            core.send(Work([job], time.monotonic()))
        answers.until(lambda: answers.moved[name] > num_moved or len(answers.failures) > num_failed)
        return answers.moved[name] > num_moved

    def _stay(self, name: str, core: CoreHandle) -> None:
        """Wait for STAY new tokens of the answer from the core that has it."""
        heard = self._answers.tokens[name]
        enough = len(heard) + STAY

        def has_stayed() -> bool:
            return name in self._answers.ends or (len(heard) >= enough and heard[max(heard)].worker == core.name)

        self._answers.until(has_stayed)

    def _keep_times(self, name: str) -> None:
        heard = [token for _, token in sorted(self._answers.tokens[name].items())]
        for before, after in pairwise(heard):
            gaps = self.steps_s if before.worker == after.worker else self.pauses_s
            gaps.append(after.at - before.at)

    def _first_token_s(self, ids: list[int]) -> float:
        name, began = ask(self._pair[0], self._pair[0], ids, 1)
        self._answers.wait([name], WAIT_S)
        return self._answers.times(name)[0] - began

    def _compare(self, ids: list[int], said: list[int]) -> None:
        name, _ = ask(self._pair[0], self._pair[0], ids, len(said))
        self._answers.wait([name], WAIT_S)
        alone = [token for _, token in sorted(self._answers.ids(name).items())]
        self.num_compared += 1
        self.num_different += alone != said

    def _num_failed(self) -> int:
        return len(self._answers.failures) - self._num_failed_before

    def _failures(self) -> list[str]:
        return self._answers.failures[self._num_failed_before :][:5]


def _tail(seconds: Sequence[float]) -> dict[str, float]:
    return {"p99": round(float(np.quantile(seconds, 0.99)) * 1e3, 3), "most": round(max(seconds) * 1e3, 3)}


if __name__ == "__main__":
    main()
