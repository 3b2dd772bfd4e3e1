"""The load on an OpenAI-compatible server, and what became of every request.

It comes from a number of users at once, or as arrivals at a rate.
"""

import asyncio
import gc
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp

from bench.load.client import QUIET_S, VOCABULARY, StreamResult, ask, body_of, random_prompt
from bench.report.result import ResultRow
from contracts.errors import Unavailable
from process.garbage_collector import freeze_startup_objects

WARM_TOKENS = 16
PERCENTILES = (50, 90, 99)


class KeyWanted(Unavailable):
    """The server answers 401: it was given no API key, or none that it knows."""


@dataclass(frozen=True)
class Lengths:
    """The tokens of each prompt and of each answer. As text `1k/8k`, where k is 1024."""

    num_in: int
    num_out: int

    def __str__(self) -> str:
        return "/".join(f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in (self.num_in, self.num_out))


@dataclass(frozen=True)
class Point:
    """One load.

    Closed loop: `users`, each of whom sends the next request as soon as the last is answered. Open loop: `rate`
    requests a second with exponential gaps (Poisson), answered or not. One of the two is None.
    """

    lengths: Lengths
    users: int | None
    rate: float | None
    num_requests: int

    @property
    def load(self) -> str:
        if self.users is None:
            return f"{self.rate:g}/s"
        return f"{self.users} user" + ("s" if self.users > 1 else "")

    @property
    def num_warm(self) -> int:
        return min(self.users or 2, self.num_requests)

    def __str__(self) -> str:
        return f"{self.lengths}, {self.load}"


@dataclass(frozen=True)
class TargetServer:
    """The server under load.

    `vocabulary` bounds the token ids of a prompt, `quiet_s` is how long an answer may be silent, and `replicas` are
    further URLs of the same model, which requests take in turn.
    """

    url: str
    model: str
    vocabulary: int = VOCABULARY
    quiet_s: float = QUIET_S
    replicas: tuple[str, ...] = ()

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url, *self.replicas)


@dataclass
class Measured:
    """The requests of a point that came to an end within `wall_s`."""

    point: Point
    answers: list[StreamResult] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def good(self) -> list[StreamResult]:
        return [answer for answer in self.answers if not answer.reason]

    @property
    def reasons(self) -> Counter[str]:
        """Count the answers that did not end well, by reason."""
        return Counter(answer.reason for answer in self.answers if answer.reason)


async def measure(
    http: aiohttp.ClientSession,
    server: TargetServer,
    measured: Measured,
    seed: int,
    tell: Callable[[StreamResult], None],
) -> None:
    """Put the point's load on the server and fill `measured`.

    It keeps what it has when this is cancelled. `tell` is called with each answer. The same seed sends the same prompts
    at the same times, whatever was measured before. Warm-up requests are not counted; Unavailable is raised if none of
    them is answered.
    """
    point = measured.point
    lengths = point.lengths

    def body(number: int, max_tokens: int) -> bytes:
        prompt = random_prompt(lengths.num_in, random.Random(f"{seed} {point} {number}"), server.vocabulary)
        return body_of(server.model, prompt, max_tokens)

    def asked(number: int, body: bytes, max_tokens: int) -> Awaitable[StreamResult]:
        url = server.urls[number % len(server.urls)]
        return ask(http, url, body, max_tokens, quiet_s=server.quiet_s)

    # All are made before the first is sent: making a prompt of 8192 takes 2 ms, in which no token would be read.
    bodies = [body(number, lengths.num_out) for number in range(point.num_requests)]

    async def counted(number: int) -> None:
        answer = await asked(number, bodies[number], lengths.num_out)
        measured.answers.append(answer)
        tell(answer)

    num_warm_tokens = min(WARM_TOKENS, lengths.num_out)
    warm = [-1 - number for number in range(max(point.num_warm, len(server.urls)))]
    await _warm_up(asked(number, body(number, num_warm_tokens), num_warm_tokens) for number in warm)
    with _unseen():
        start = time.perf_counter()
        try:
            await (_closed(point, counted) if point.rate is None else _open(point.rate, point, counted, seed))
        finally:
            measured.wall_s = time.perf_counter() - start


@contextmanager
def _unseen() -> Iterator[None]:
    """Exempt what this process has imported, torch mostly, from garbage collection while the block runs.

    A collection of all that would delay every token by 20 to 30 ms.
    """
    freeze_startup_objects()
    try:
        yield
    finally:
        gc.unfreeze()


async def _warm_up(requests: Iterator[Awaitable[StreamResult]]) -> None:
    answers = await asyncio.gather(*requests)
    if all(answer.reason for answer in answers):
        kind, first = _kind_of(answers[0].refusal), answers[0].error
        raise kind(f"none of {len(answers)} requests to warm up was answered; the first: {first}")


async def _closed(point: Point, one: Callable[[int], Awaitable[None]]) -> None:
    numbers = iter(range(point.num_requests))

    async def user() -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as users:
        for _ in range(min(point.users or 1, point.num_requests)):
            users.create_task(user())


async def _open(rate: float, point: Point, one: Callable[[int], Coroutine], seed: int) -> None:
    loop, rng = asyncio.get_running_loop(), random.Random(f"{seed} {point} arrivals")
    due_s = loop.time()
    async with asyncio.TaskGroup() as arrived:
        for number in range(point.num_requests):
            arrived.create_task(one(number))
            due_s += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due_s - loop.time()))


def rows_of(measured: Measured, num_gpus: int) -> list[ResultRow]:
    """Return the figures of a point; without an answer those that need one are left out.

    `num_gpus` is 0 if it is not known.
    """
    point, good = measured.point, measured.good
    load = {"rate": point.rate} if point.users is None else {"users": point.users}
    params = {"lengths": str(point.lengths)} | load
    rows = [
        ResultRow("requests", len(measured.answers), "requests", params),
        ResultRow("failed", len(measured.answers) - len(good), "requests", params),
        *(
            ResultRow(f"failed: {reason}", count, "requests", params)
            for reason, count in measured.reasons.most_common()
        ),
    ]
    if not good:
        return rows
    if short := sum(answer.num_tokens < point.lengths.num_out for answer in good):
        rows.append(ResultRow("shorter than asked for", short, "requests", params))
    rows += _percentiles("TTFT", [answer.ttft_s * 1e3 for answer in good], "ms", params)
    rows += _percentiles("ITL", [gap_s * 1e3 for answer in good for gap_s in answer.gaps_s], "ms", params)
    rows += _percentiles("E2E", [answer.total_s for answer in good], "s", params)
    rows.append(ResultRow("output", sum(answer.num_tokens for answer in good) / measured.wall_s, "tokens/s", params))
    rows.append(ResultRow("input and output", throughput(measured), "tokens/s", params))
    if num_gpus:
        rows.append(ResultRow("input and output per GPU", throughput(measured) / num_gpus, "tokens/s", params))
    if (rate := interactivity(good)) is not None:
        rows.append(ResultRow("interactivity", rate, "tokens/s/user", params))
    return rows


def throughput(measured: Measured) -> float:
    """Return the tokens of prompts and answers per second."""
    num_tokens = sum(measured.point.lengths.num_in + answer.num_tokens for answer in measured.good)
    return num_tokens / measured.wall_s


def interactivity(answers: Sequence[StreamResult]) -> float | None:
    """Return the tokens per second that the median user sees after the first.

    It is 1 / the median of the answers' time per output token.
    """
    times_s = [(a.total_s - a.ttft_s) / (a.num_tokens - 1) for a in answers if a.num_tokens > 1]
    return 1 / statistics.median(times_s) if times_s else None


def _percentiles(name: str, values: list[float], unit: str, params: dict) -> list[ResultRow]:
    return [ResultRow(f"{name} p{share}", percentile(values, share), unit, params) for share in PERCENTILES if values]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` per cent of `values` lie below; it is always one of them."""
    return sorted(values)[min(len(values) - 1, int(share / 100 * len(values)))]


async def first_model(http: aiohttp.ClientSession, url: str) -> dict:
    """Return what the server lists first at /v1/models; raise Unavailable if it lists nothing."""
    card = await _get(http, f"{url}/v1/models")
    models = card.get("data") if isinstance(card, dict) else None
    if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
        raise Unavailable(f"{url}/v1/models lists no model: name it with --model")
    return models[0]


async def version_of(http: aiohttp.ClientSession, url: str) -> str:
    """Return what the server says at /version, as Tandem and vLLM do, or an empty text."""
    try:
        said = await _get(http, f"{url}/version")
    except Unavailable:
        return ""
    return str(said.get("version", "")) if isinstance(said, dict) else ""


GET_TIMEOUT_S = 20.0


async def _get(http: aiohttp.ClientSession, url: str) -> object:
    try:
        async with asyncio.timeout(GET_TIMEOUT_S), http.get(url) as response:
            if response.status == 200:
                return await response.json(content_type=None)
            raise _kind_of(response.status)(f"{url} answers {response.status} {response.reason}")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unavailable(f"nobody answers at {url} as an OpenAI-compatible server does: {_reason(error)}") from error


def _kind_of(refusal: int) -> type[Unavailable]:
    """Return the error for an HTTP status."""
    return KeyWanted if refusal == 401 else Unavailable


def _reason(error: Exception) -> str:
    """Return the error in one line; time-outs have no text of their own."""
    return f"{str(error)[:200] or type(error).__name__}"
