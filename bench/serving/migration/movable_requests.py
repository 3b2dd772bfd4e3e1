"""Requests with all that an answer can have besides its KV, and a client that keeps every token.

Each kind has state that has to move with an answer: the draws of a seed, penalties, a grammar, a stop string that is
found in text of both workers, log-probabilities, several answers of one prompt.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import aiohttp

from bench.load.client import VOCABULARY, random_prompt

PROMPT_TOKENS = (40, 90, 150)
QUIET_S = 120.0
REFUSED, REFUSED_S, REFUSED_PERIOD_S = "HTTP 503", 60.0, 0.5
TOLERANCE = 2e-3
"""How far apart log-probabilities may be: batches of other sizes add up in another order."""
SCHEMA = {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}
FEW = 20
"""How many tokens are drawn from: of more, two are often so near that rounding decides, as it does in a replay."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy, logprobs": {"temperature": 0, "logprobs": 2},
    "seed": {"temperature": 0.8, "top_p": 0.9},
    "n = 2": {"temperature": 1.0, "n": 2, "logprobs": 0, "top_k": FEW},
    "penalties": {
        "temperature": 0.7,
        "top_k": FEW,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.1,
    },
    "regular expression": {"temperature": 1.0, "structured_outputs": {"regex": "([a-z]{2,9} ){2000}"}, "logprobs": 1},
    "JSON schema": {"temperature": 1.0, "structured_outputs": {"json": SCHEMA | {"minItems": 400}}},
    "stop string": {"temperature": 0.9, "logprobs": 0, "top_k": FEW},
    "min_tokens, logit_bias": {
        "temperature": 1.0,
        "top_k": FEW,
        "min_tokens": 20,
        "logit_bias": {"108": 3.0, "110": -100},
    },
}
"""Kind -> the fields of its requests."""
STOP = "stop string"


@dataclass(frozen=True)
class MovableRequest:
    """A completion to ask for; `name` is its X-Request-Id."""

    name: str
    kind: str
    body: Mapping[str, Any]

    @property
    def num_choices(self) -> int:
        return self.body.get("n", 1)


@dataclass
class ChoiceTokens:
    """One answer: its tokens, when each came (monotonic seconds), and all that is said of them."""

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    text: str = ""
    finish: str = ""

    def difference(self, other: "ChoiceTokens") -> str:
        """Return in words how it differs from `other`; empty if it does not."""
        if self.tokens != other.tokens:
            at = next((i for i, (a, b) in enumerate(zip(self.tokens, other.tokens, strict=False)) if a != b), -1)
            return f"token {at} of {len(self.tokens)} and {len(other.tokens)}{self._said_at(at, other)}"
        if (self.text, self.finish) != (other.text, other.finish):
            return f"text or end: {self.text[-40:]!r} {self.finish}, {other.text[-40:]!r} {other.finish}"
        pairs = zip(self.logprobs, other.logprobs, strict=True) if len(self.logprobs) == len(other.logprobs) else None
        if pairs is None or any(a is None or b is None or abs(a - b) > TOLERANCE for a, b in pairs):
            return "log-probabilities"
        return "" if all(map(_is_near, self.top_logprobs, other.top_logprobs)) else "top log-probabilities"

    @property
    def gaps_s(self) -> list[float]:
        """Return the times between its tokens."""
        return [later - sooner for sooner, later in pairwise(self.times_s)]

    def _said_at(self, at: int, other: "ChoiceTokens") -> str:
        """Return what tells rounding from a fault: how near the two were before they differ."""
        if at < 0 or min(len(self.logprobs), len(other.logprobs)) <= at:
            return ""
        apart = max(
            (abs((a or 0.0) - (b or 0.0)) for a, b in zip(self.logprobs[:at], other.logprobs, strict=False)),
            default=0.0,
        )
        gaps_s = self.gaps_s[:at] or [0.0]
        halted_at = gaps_s.index(max(gaps_s)) + 1
        return (
            f": {self.tokens[at]} of log-probability {self.logprobs[at]:.6f} for {other.tokens[at]} of "
            f"{other.logprobs[at]:.6f}; those before differ by {apart:.1e} at most; its longest gap before, "
            f"{max(gaps_s):.2f} s, was before token {halted_at}"
        )


@dataclass
class StreamedReply:
    """The answers to a request, or why they did not end well."""

    request: MovableRequest
    choices: list[ChoiceTokens]
    error: str = ""

    def difference(self, other: "StreamedReply") -> str:
        """Return in words how it differs from `other`; empty if it does not."""
        if self.error or other.error:
            return self.error or other.error
        found = [a.difference(b) for a, b in zip(self.choices, other.choices, strict=True)]
        return next((words for words in found if words), "")


def movable_requests(
    model: str, count: int, num_tokens: int, rng: random.Random, vocabulary: int = VOCABULARY
) -> list[MovableRequest]:
    """Return requests of all kinds in turn, for answers of `num_tokens` where no stop string ends them."""
    requests: list[MovableRequest] = []
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        body = {
            "model": model,
            "prompt": random_prompt(rng.choice(PROMPT_TOKENS), rng, vocabulary),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "seed": number,
        }
        requests.append(MovableRequest(f"r{number}", kind, body | KINDS[kind]))
    return requests


def stopped(request: MovableRequest, reply: StreamedReply) -> MovableRequest:
    """Return the request with a stop string that `reply` to it has after four fifths."""
    text = reply.choices[0].text
    at = len(text) * 4 // 5
    return replace(request, body={**request.body, "stop": [text[at : at + 8]]})


async def stream_reply(http: aiohttp.ClientSession, url: str, request: MovableRequest) -> StreamedReply:
    """Ask and keep what comes. It always ends, and a fault is in the reply.

    What is refused for the moment is asked again: the process for grammars, or a service that was killed, may not be
    there yet.
    """
    until = time.monotonic() + REFUSED_S
    while (reply := await stream_once(http, url, request)).error.startswith(REFUSED) and time.monotonic() < until:
        await asyncio.sleep(REFUSED_PERIOD_S)
    return reply


async def stream_once(http: aiohttp.ClientSession, url: str, request: MovableRequest) -> StreamedReply:
    """Ask once and keep what comes. It always ends, and a fault is in the reply."""
    reply = StreamedReply(request, [ChoiceTokens() for _ in range(request.num_choices)])
    loop = asyncio.get_running_loop()
    try:
        async with (
            asyncio.timeout(QUIET_S) as patience,
            http.post(f"{url}/v1/completions", json=request.body, headers={"x-request-id": request.name}) as response,
        ):
            if response.status != 200:
                reply.error = f"HTTP {response.status} {(await response.text())[:200]}"
                return reply
            async for line in response.content:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    _take(reply, json.loads(data), time.monotonic())
                    patience.reschedule(loop.time() + QUIET_S)
    except TimeoutError:
        reply.error = f"lost: no token came for {QUIET_S:g} s"
    except (aiohttp.ClientError, OSError) as error:
        reply.error = f"connection lost: {type(error).__name__}"
    if not reply.error and not all(choice.finish for choice in reply.choices):
        reply.error = "the stream ended without a finish_reason"
    return reply


async def stream_all(
    http: aiohttp.ClientSession, url: str, requests: Sequence[MovableRequest], num_at_once: int
) -> list[StreamedReply]:
    """Return the replies to all, in order, so many at once."""
    places = asyncio.Semaphore(num_at_once)

    async def one(request: MovableRequest) -> StreamedReply:
        async with places:
            return await stream_reply(http, url, request)

    return await asyncio.gather(*map(one, requests))


async def known_replies(
    http: aiohttp.ClientSession, url: str, requests: Sequence[MovableRequest], num_at_once: int
) -> list[StreamedReply]:
    """Return the replies of an undisturbed system, to requests whose stop strings they have.

    Raises RuntimeError if one fails.
    """
    free = [request for request in requests if request.kind == STOP]
    texts = {reply.request.name: reply for reply in await stream_all(http, url, free, num_at_once)}
    final = [stopped(r, texts[r.name]) if r.name in texts else r for r in requests]
    replies = await stream_all(http, url, final, num_at_once)
    if failed := [f"{reply.request.kind}: {reply.error}" for reply in replies if reply.error]:
        raise RuntimeError(f"without a disturbance: {failed[0]}")
    return replies


def _take(reply: StreamedReply, event: dict[str, Any], now: float) -> None:
    if event.get("error"):
        reply.error = f"error in the stream: {event['error']}"[:300]
        return
    for said in event["choices"]:
        choice = reply.choices[said["index"]]
        tokens, logprobs = said.get("token_ids") or [], said.get("logprobs") or {}
        choice.tokens += tokens
        choice.times_s += [now] * len(tokens)
        choice.logprobs += logprobs.get("token_logprobs") or []
        choice.top_logprobs += [each or {} for each in logprobs.get("top_logprobs") or []]
        choice.text += said.get("text") or ""
        choice.finish = said.get("finish_reason") or choice.finish


def _is_near(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Return whether the values are near; of two that are nearly equal either may be among the top."""
    pairs = zip(sorted(one.values()), sorted(other.values()), strict=False)
    return len(one) == len(other) and all(abs(a - b) <= TOLERANCE for a, b in pairs)
