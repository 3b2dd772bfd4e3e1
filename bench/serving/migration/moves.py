"""Moves under load: are all tokens those of an undisturbed worker, and how long is an answer paused?"""

import asyncio
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from bench.load.client import session
from bench.report.result import ResultRow
from bench.serving.migration.movable_requests import KINDS, StreamedReply, known_replies, movable_requests, stream_reply
from bench.serving.migration.moving_services import MovingServices
from bench.system.leftovers import still_held
from bench.system.local_system import model_of
from bench.system.services import Services

SETTINGS = {"TANDEM_NUM_THREADS": "1", "TANDEM_DTYPE": "float32", "TANDEM_KV_CACHE_MIB": "512"}
ROLES = {"p0": ("--role", "prefill"), "d0": ("--role", "decode"), "d1": ("--role", "decode")}
START_TIMEOUT_S, REST_TIMEOUT_S, TELL_S = 90.0, 60.0, 20.0
SMALL_SHARE, SHARE = 0.5, 0.12
"""What each worker gives away at each of ten looks a second, of a small model and of another: an answer moves about
five times, or once, a second."""
MAX_ROUNDS = 200
_ID = re.compile(r"cmpl-(?P<name>r\d+\.\d+)-[0-9a-f]+(-(?P<choice>\d+))?")


@dataclass
class MovesRun:
    """What moved and what became of it. Times in seconds.

    `pauses_s`: from an answer's last token of the source to the first of the destination, as the client got them.
    `steps_s`: between its other tokens.
    """

    num_at_once: int
    num_moves: int = 0
    num_answers: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    moves_of: Counter[str] = field(default_factory=Counter)
    pauses_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    source_pause_s: float = 0.0
    held: list[str] = field(default_factory=list)
    span_s: float = 0.0


async def right_replies(
    folder: Path, settings: dict[str, str], count: int, num_tokens: int, vocabulary: int, seed: int
) -> list[StreamedReply]:
    """Return the replies of one worker that nothing disturbs."""
    folder.mkdir()
    with Services(folder, {"m0": ("--role", "mixed")}, **settings) as services:
        await services.start_all(START_TIMEOUT_S)
        async with session() as http:
            requests = movable_requests(model_of(services.url), count, num_tokens, random.Random(seed), vocabulary)
            return await known_replies(http, services.url, requests, len(KINDS))


async def move_under_load(
    services: MovingServices, right: Sequence[StreamedReply], num_moves: int, num_at_once: int, share: float
) -> MovesRun:
    """Ask for the same, so many at once and again and again, until so many moves were made."""
    run, began_s, num_before = MovesRun(num_at_once), time.monotonic(), len(services.moved())
    paused = [services.counter(name) for name in ("migration_pause_seconds", "migrations_committed")]
    replies: list[StreamedReply] = []
    turns = _turns(right)
    services.order(share)

    def is_done() -> bool:
        return len(services.moved()) - num_before >= num_moves

    async with session() as http:
        askers = [_ask_on(http, services.url, turns, replies, is_done) for _ in range(num_at_once)]
        telling = asyncio.create_task(_tell(services, num_before, num_moves))
        await asyncio.gather(*askers)
        telling.cancel()
    services.order(0)
    run.span_s = time.monotonic() - began_s
    await asyncio.sleep(0.3)  # a core reports its counters ten times a second
    seconds, count = (services.counter(name) for name in ("migration_pause_seconds", "migrations_committed"))
    run.source_pause_s = (seconds - paused[0]) / max(1.0, count - paused[1])
    _judge(run, replies, {reply.request.name: reply for reply in right}, services.moved()[num_before:])
    run.held = await _rest(services)
    return run


def rows(run: MovesRun, load: str) -> list[ResultRow]:
    """Return the figures of a run under the load of that name."""
    params = {"load": load, "answers at once": run.num_at_once}
    step_s = _at(run.steps_s, 0.5)
    found = [
        ResultRow("moves", run.num_moves, "", params | {"answers": run.num_answers, "s": round(run.span_s)}),
        ResultRow("answers with a wrong token, log-probability or end", sum(run.wrong.values()), "", params),
        ResultRow("not given back at rest", len(run.held), "things", params),
        ResultRow("step: gap of an answer that does not move, p50", 1e3 * step_s, "ms", params),
        ResultRow("step: gap of an answer that does not move, p99", 1e3 * _at(run.steps_s, 0.99), "ms", params),
    ]
    for name, share in (("p50", 0.5), ("p99", 0.99), ("most", 1.0)):
        pause_s = _at(run.pauses_s, share)
        found.append(
            ResultRow(
                f"pause: last token of the source to first of the destination, {name}", 1e3 * pause_s, "ms", params
            )
        )
        found.append(ResultRow(f"pause beyond one step, {name}", 1e3 * (pause_s - step_s), "ms", params))
    found.append(ResultRow("pause at the source by its metric, mean", 1e3 * run.source_pause_s, "ms", params))
    return found


def _turns(right: Sequence[StreamedReply]) -> Iterator[StreamedReply]:
    for number in range(MAX_ROUNDS):
        for reply in right:
            yield replace(reply, request=replace(reply.request, name=f"{reply.request.name}.{number}"))


async def _ask_on(
    http: aiohttp.ClientSession, url: str, turns: Iterator[StreamedReply], replies: list[StreamedReply], is_done
) -> None:
    while not is_done() and (turn := next(turns, None)) is not None:
        replies.append(await stream_reply(http, url, turn.request))


def _judge(run: MovesRun, replies: Sequence[StreamedReply], right: dict[str, StreamedReply], moves: list[dict]) -> None:
    """Compare each reply with the right one, and sort its gaps into pauses and steps."""
    moved_at: dict[tuple[str, int], set[int]] = {}
    for move in moves:
        if (found := _ID.fullmatch(move["request"])) is not None:
            place = moved_at.setdefault((found["name"], int(found["choice"] or 0)), set())
            place.add(move["first_index"])
    run.num_moves, run.num_answers = len(moves), sum(len(reply.choices) for reply in replies)
    for reply in replies:
        if words := reply.difference(right[reply.request.name.partition(".")[0]]):
            run.wrong[reply.request.kind] += 1
            print(f"wrong: {reply.request.name}, {reply.request.kind}: {words}", file=sys.stderr, flush=True)
        for index, choice in enumerate(reply.choices):
            at = moved_at.get((reply.request.name, index), set())
            run.moves_of[reply.request.kind] += len(at)
            for number in range(2, len(choice.times_s)):  # the first gap has the handoff in it
                gap_s = choice.times_s[number] - choice.times_s[number - 1]
                (run.pauses_s if number in at else run.steps_s).append(gap_s)


async def _rest(services: MovingServices) -> list[str]:
    until = time.monotonic() + REST_TIMEOUT_S
    while (held := await still_held(services)) and time.monotonic() < until:
        await asyncio.sleep(0.2)
    return held


async def _tell(services: MovingServices, num_before: int, num_moves: int) -> None:
    while True:
        await asyncio.sleep(TELL_S)
        print(f"{len(services.moved()) - num_before} of {num_moves} moves", file=sys.stderr, flush=True)


def _at(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
