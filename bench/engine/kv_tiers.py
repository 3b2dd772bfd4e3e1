"""The benchmark of tiers below the KV cache: first tokens from memory, disk, store, and computed.

`python -m bench.engine.kv_tiers [--peer CHECKOUT] [--rounds 3] [--out FILE]`

Each way of serving is a process, and they take turns. There are three parts: a prompt of 4096 tokens that a tier holds,
beside the same engine computing it; the second turn of a conversation of 1500 tokens that another one pushed out of
the cache, beside `--peer`, a checkout without tiers; and conversations of several turns whose KV is up to four times
what the cache holds, with the host tier and without, beside a cache that holds all of it.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.report.result import ResultRow, checkout, commit_of, write_result
from coordinator.store.local_server import RedisServer

SERVER = Path(__file__).with_name("prompt_server.py")
HERE = Path(__file__).parents[2]
PROMPT, TURN_BEFORE, NEW_TURN = 4096, 1500, 64
NUM_CONVERSATIONS, NUM_TURNS, TURN_TOKENS, ANSWER_TOKENS = 6, 5, 208, 32
WORKING_SET = NUM_CONVERSATIONS * NUM_TURNS * (TURN_TOKENS + ANSWER_TOKENS)
SHARES = (1, 2, 4)
"""The working set is so many times what the cache holds."""
HOST_GIB = 1.0
LIMITS = {"host": 0.05, "disk": 0.08, "store": 0.15}
"""The most that a first token may take, in parts of computing the prompt."""
VOCAB = 40_000
_random = np.random.default_rng(7)
log = logging.getLogger(__name__)


class ServedEngine:
    """A process with an engine, asked over its pipes."""

    def __init__(self, options: Sequence[str], checkout: Path = HERE) -> None:
        env = os.environ | {"PYTHONPATH": str(checkout)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SERVER), *options],
            cwd=checkout, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.token_nbytes = int(self._read()["token_nbytes"])

    def answer(self, tokens: Sequence[int], max_tokens: int = 1, settle: bool = True) -> dict[str, Any]:
        """Return what prompt_server says of a request."""
        assert self._process.stdin is not None
        command = {"tokens": list(tokens), "max_tokens": max_tokens, "settle": settle}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def ttft_s(self, tokens: Sequence[int]) -> float:
        return float(self.answer(tokens)["ttft_s"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{SERVER.name} ended with code {self._process.wait(timeout=60)}")
        return json.loads(line)


@cache
def token_nbytes() -> int:
    """Return the bytes of KV of one token here."""
    engine = ServedEngine(("--pool-nbytes", str(8 << 20)))
    engine.close()
    return engine.token_nbytes


@contextmanager
def served(pool_tokens: int, *options: str, checkout: Path = HERE) -> Iterator[ServedEngine]:
    """Start an engine whose cache has room for so many tokens."""
    engine = ServedEngine(("--pool-nbytes", str(pool_tokens * token_nbytes()), *options), checkout)
    try:
        yield engine
    finally:
        engine.close()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=checkout, help="a checkout without tiers, for the second turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--note", default="", help="what should be known of the run, such as a busy machine")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[ResultRow] = []
    for part in (lambda: second_turn(args.rounds, args.peer), lambda: from_tiers(args.rounds), working_sets):
        rows += part()
        log.info("%s", rows)
    config = {
        "rounds": args.rounds,
        "working_set_tokens": WORKING_SET,
        "peer": commit_of(args.peer) if args.peer else "",
        "note": args.note,
    }
    log.info("%s", write_result(args.out, "kv-tiers", rows, config).with_suffix(".md").read_text(encoding="utf-8"))


def random_tokens(num: int) -> list[int]:
    return _random.integers(100, VOCAB, num).tolist()


def from_tiers(rounds: int) -> list[ResultRow]:
    """Two prompts push each other out of the cache: each comes from the tier again, or is computed again."""
    prompts = [random_tokens(PROMPT) for _ in range(2)]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        redis = stack.enter_context(RedisServer())
        options = {
            "computing": (),
            "host": ("--kv-host-gib", str(HOST_GIB)),
            "disk": ("--kv-disk", folder),
            "store": ("--kv-store", redis.url),
        }
        engines = {name: stack.enter_context(served(PROMPT + 256, *flags)) for name, flags in options.items()}
        for engine in engines.values():
            for prompt in prompts:
                engine.answer(prompt)
        taken = {name: list[float]() for name in engines}
        for _ in range(rounds):
            for prompt in prompts:
                for name, engine in engines.items():
                    taken[name].append(engine.ttft_s(prompt))
    computing_s = statistics.median(taken.pop("computing"))
    return [
        ResultRow(
            "first token of a prompt that a tier holds", statistics.median(values), "s",
            {"tokens": PROMPT, "tier": name, "at most": f"{LIMITS[name]} x"},
            peer="computing it", peer_value=computing_s,
        )
        for name, values in taken.items()
    ]  # fmt: skip


def second_turn(rounds: int, peer: Path | None) -> list[ResultRow]:
    """A conversation of TURN_BEFORE tokens goes on after another one has used the cache."""
    if peer is None:
        return []
    pool = TURN_BEFORE + 256
    taken: dict[str, list[float]] = {"ours": [], "peer": []}
    with served(pool, "--kv-host-gib", str(HOST_GIB)) as ours, served(pool, checkout=peer) as theirs:
        for _ in range(2 * rounds):
            first, other, new = random_tokens(TURN_BEFORE - 32), random_tokens(TURN_BEFORE), random_tokens(NEW_TURN)
            for name, engine in (("ours", ours), ("peer", theirs)):
                answer = engine.answer(first, 32)["tokens"]
                engine.answer(other)
                taken[name].append(engine.ttft_s([*first, *answer, *new]))
    return [
        ResultRow(
            "first token of a second turn", statistics.median(taken["ours"]), "s",
            {"tokens before it": TURN_BEFORE, "new": NEW_TURN, "at most": "0.35 x"},
            peer=f"commit {commit_of(peer)}", peer_value=statistics.median(taken["peer"]),
        )
    ]  # fmt: skip


def working_sets() -> list[ResultRow]:
    """Conversations in turn, whose KV is once to four times what the cache holds."""
    unlimited = median_ttft_s(2 * WORKING_SET)
    rows: list[ResultRow] = []
    for share in SHARES:
        for name, flags in (("host tier", ("--kv-host-gib", str(HOST_GIB))), ("none", ())):
            params: dict[str, Any] = {"working set": f"{share} x the cache", "tier": name}
            if name != "none":
                params["at most"] = "1.3 x"
            value = median_ttft_s(WORKING_SET // share, *flags)
            log.info("%s: %.3f s, unlimited %.3f s", params, value, unlimited)
            rows.append(
                ResultRow(
                    "median first token of conversations in turn", value, "s", params,
                    peer="a cache that holds all", peer_value=unlimited,
                )
            )  # fmt: skip
    return rows


def median_ttft_s(pool_tokens: int, *flags: str) -> float:
    """Return the median of all turns but each conversation's first, which nothing could hold."""
    random = np.random.default_rng(11)
    said = [list[int]() for _ in range(NUM_CONVERSATIONS)]
    taken: list[float] = []
    with served(pool_tokens, *flags) as engine:
        engine.answer(random.integers(100, VOCAB, 512).tolist())  # its speed is known from then on
        for turn in range(NUM_TURNS):
            for conversation in said:
                conversation += random.integers(100, VOCAB, TURN_TOKENS).tolist()
                answer = engine.answer(conversation, ANSWER_TOKENS, settle=False)
                conversation += answer["tokens"]
                if turn:
                    taken.append(answer["ttft_s"])
    return statistics.median(taken)


if __name__ == "__main__":
    main()
