"""The benchmark of the next turn of a conversation between two workers on GPUs.

`python -m bench.handoff.reuse [--devices cuda:0 cuda:0] [--transfers nvlink ucx tcp] [--check] [--out FILE]`

Decode answers a first turn all by itself. Prefill then gets the second, which begins with all of the first, and pulls
what it lacks: from decode's cache, or, once other prompts are in that, from the memory tier below it. The peer is
prefill computing as many tokens. Two engine cores as bench.handoff.gpu has them, random weights in Llama-8B's shape.

`--check`: the same in float32 with few layers, and each second turn is also computed by a third core that has no cache:
its greedy tokens must be equal.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from bench.handoff.core import CoreSpec
from bench.handoff.front import Answers, CoreHandle, ask, config_of, meet, prompt
from bench.report.result import ResultRow, write_result

ANSWER, NEW_TURN, SAID = 128, 16, 24
"""Tokens: of the first turn's answer, what is new in the second turn, and its answer."""
SETTLE_S = 1.0
"""How long a tier gets to keep what is new."""
_log = logging.getLogger(__name__)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"], help="of prefill and of decode")
    parser.add_argument("--transfers", nargs="+", default=["nvlink", "ucx", "tcp"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    config = config_of(args)
    rows: list[ResultRow] = []
    for transfer in args.transfers:
        with cores(args, transfer) as (prefill, decode, alone, answers):
            for length in args.lengths:
                rows += measured(Turns(prefill, decode, alone, answers, length), transfer, args.repeats)
                _log.info("%s", write_result(args.out, "gpu-reuse", rows, config))


@contextmanager
def cores(
    args: argparse.Namespace, transfer: str
) -> Iterator[tuple[CoreHandle, CoreHandle, CoreHandle | None, Answers]]:
    """Run prefill, decode, and with `--check` one that computes all.

    Decode's cache holds two of the longest prompts.
    """
    answers, longest = Answers(), max(args.lengths) + ANSWER + NEW_TURN + SAID + 64
    base = CoreSpec(
        device=args.devices[0],
        num_layers=4 if args.check else 32,
        dtype="float32" if args.check else "float8",
        max_model_len=longest,
        kv_cache_gib=16,
        prefix_cache=True,
        transfer=transfer,
        reuse=True,
    )
    token_nbytes = base.num_layers * 2 * 8 * 128 * (4 if args.check else 1)
    small_gib = -(-5 * longest * token_nbytes // 2 // 2**30)
    specs = {"prefill": base}
    specs["decode"] = msgspec.structs.replace(base, device=args.devices[1], kv_cache_gib=small_gib, kv_host_gib=12.0)
    if args.check:
        specs["alone"] = msgspec.structs.replace(base, prefix_cache=False, reuse=False)
    started = {name: CoreHandle(name, spec, answers) for name, spec in specs.items()}
    try:
        for core in started.values():
            core.wait_ready()
        meet(started["prefill"], started["decode"])
        meet(started["decode"], started["prefill"])
        yield started["prefill"], started["decode"], started.get("alone"), answers
    finally:
        for core in started.values():
            core.kill()


class Turns:
    """Conversations of two turns: the first of `length` tokens, and an answer of ANSWER."""

    def __init__(
        self, prefill: CoreHandle, decode: CoreHandle, alone: CoreHandle | None, answers: Answers, length: int
    ) -> None:
        self.prefill, self.decode, self.alone, self.answers, self.length = prefill, decode, alone, answers, length
        self._rng = np.random.default_rng(length)
        self.num_different = 0

    def second(self, is_evicted: bool) -> tuple[float, int]:
        """Return the seconds to the first token of a second turn, and how much of it was not computed."""
        ids = prompt(self._rng, self.length)
        said = self._tokens(ask(self.decode, self.decode, ids, ANSWER)[0])
        turn = [*ids, *said, *prompt(self._rng, NEW_TURN)]
        if is_evicted:
            time.sleep(SETTLE_S)
            for _ in range(4 * 8192 // self.length if self.length < 8192 else 4):
                self._tokens(ask(self.decode, self.decode, prompt(self._rng, self.length), 1)[0])
        name, began = ask(self.prefill, self.decode, turn, SAID, source=self.decode)
        tokens = self._tokens(name)
        if self.alone is not None:
            self.num_different += tokens != self._tokens(ask(self.alone, self.alone, turn, SAID)[0])
        return self.answers.times(name)[0] - began, self.answers.cached[name]

    def computed_s(self) -> float:
        """Return the seconds to the first token of as long a prompt that nobody has."""
        ids = prompt(self._rng, self.length + ANSWER + NEW_TURN)
        name, began = ask(self.prefill, self.decode, ids, SAID)
        self._tokens(name)
        return self.answers.times(name)[0] - began

    def _tokens(self, name: str) -> list[int]:
        self.answers.wait([name], 60)
        assert self.answers.ends[name] == "finished", self.answers.ends[name]
        return [token for _, token in sorted(self.answers.ids(name).items())]


def measured(turns: Turns, transfer: str, repeats: int) -> list[ResultRow]:
    """Return first tokens of second turns beside computing them; the first two are not counted."""
    taken: dict[str, list[tuple[float, int]]] = {"cache": [], "tier": []}
    computed: list[float] = []
    for number in range(repeats + 2):
        for where in sorted(taken, reverse=number % 2 == 1):
            taken[where].append(turns.second(where == "tier"))
        computed.append(turns.computed_s())
    status = turns.prefill.status
    _log.info("%s", {name: value for name, value in (status.counters if status else {}).items() if "peer" in name})
    peer_ms = statistics.median(computed[2:]) * 1e3
    rows: list[ResultRow] = []
    for where, found in taken.items():
        seconds, cached = zip(*found[2:], strict=True)
        params = {"tokens": turns.length + ANSWER + NEW_TURN, "by": transfer, "from": f"the other worker's {where}"}
        params |= {"not computed": statistics.median(cached), "least": min(cached), "runs": repeats}
        params |= {"slowest": round(max(seconds) * 1e3, 2)} | _checked(turns, repeats)
        rows.append(
            ResultRow(
                "first token", statistics.median(seconds) * 1e3, "ms", params, peer="computing it", peer_value=peer_ms
            )
        )
        _log.info("%s: %.2f ms, computing %.2f", params, rows[-1].value, peer_ms)
    return rows


def _checked(turns: Turns, repeats: int) -> dict[str, int]:
    """Return how many second turns had other tokens than without any cache, if that was looked at."""
    return {} if turns.alone is None else {"compared": 2 * (repeats + 2), "different": turns.num_different}


if __name__ == "__main__":
    main()
