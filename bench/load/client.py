"""The streaming client of the load generator, which records when each token came and what went wrong."""

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

VOCABULARY = 32_000
"""Token ids below this exist in the vocabulary of every supported family."""
QUIET_S = 120.0
GREEDY: Mapping[str, float] = {"temperature": 0}
MAX_SAID = 200
_JSON = {"content-type": "application/json"}
_STREAMS = ("text/event-stream", "application/json")  # vLLM's toy proxy of a pair sends the latter
SPARE_EVENTS = 8
"""The events that a stream may have beyond one per token: some servers open or close it with an empty one."""


@dataclass
class StreamResult:
    """The outcome of one streamed answer.

    `ttft_s` counts from the request's start, `gaps_s` are the times between events with tokens; a server may put
    several tokens into one event. `num_tokens` is what the server's `usage` says, or without it the number of those
    events. `reason` says in words that can be counted why the answer did not end well, `error` the same with the
    server's words; both are empty if it did. `refusal` is the HTTP status by which the server refused, or 0.
    `fingerprint` is the system_fingerprint that it told.
    """

    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    num_tokens: int = 0
    reason: str = ""
    error: str = ""
    text: str = ""
    refusal: int = 0
    fingerprint: str = ""


class BrokenStream(Exception):
    """An answer that did not end well: a reason to count, what was seen, and the status of a refusal."""

    def __init__(self, reason: str, seen: object = "", refusal: int = 0) -> None:
        super().__init__(reason, seen)
        self.reason, self.seen, self.refusal = reason, str(seen)[:MAX_SAID], refusal


def random_prompt(num_tokens: int, rng: random.Random, vocabulary: int = VOCABULARY) -> list[int]:
    """Return random token ids, so that no prefix cache helps and no tokenizer is measured."""
    return rng.choices(range(min(10, vocabulary - 1), vocabulary), k=num_tokens)


def body_of(model: str, prompt: list[int], max_tokens: int, sampling: Mapping[str, float] = GREEDY) -> bytes:
    """Return the body of a streamed completion of exactly `max_tokens`."""
    return json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }
    ).encode()


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    body: bytes,
    max_tokens: int,
    leave_after: int | None = None,
    quiet_s: float = QUIET_S,
) -> StreamResult:
    """Stream the completion that `body_of` asks for; it always ends, and any fault is in the result.

    `leave_after`: hang up after this many tokens. `quiet_s`: give up when no token came for this long.
    """
    answer, start = StreamResult(), time.perf_counter()
    try:
        await _stream(
            http, f"{url}/v1/completions", body, _StreamTimer(answer, start, max_tokens, leave_after), quiet_s
        )
    except BrokenStream as broken:
        answer.reason, answer.error, answer.refusal = broken.reason, broken.seen or broken.reason, broken.refusal
    except TimeoutError:
        answer.reason, answer.error = "silent", f"no token came for {quiet_s:g} s"
    except tuple(FAILURES) as error:
        answer.reason = next(words for kind, words in FAILURES.items() if isinstance(error, kind))
        answer.error = f"{type(error).__name__}: {error}"[:MAX_SAID]
    answer.total_s = time.perf_counter() - start
    return answer


async def answered(url: str, model: str, prompt: list[int], max_tokens: int, quiet_s: float = QUIET_S) -> StreamResult:
    """Return one answer, on a connection of its own. Raises RuntimeError if it did not end well."""
    async with session() as http:
        answer = await ask(http, url, body_of(model, prompt, max_tokens), max_tokens, quiet_s=quiet_s)
    if answer.error:
        raise RuntimeError(answer.error)
    return answer


FAILURES: dict[type[Exception], str] = {
    aiohttp.ClientConnectorError: "no connection",
    aiohttp.ClientResponseError: "garbage",  # the reply is not HTTP
    HttpProcessingError: "garbage",  # a line does not end
    aiohttp.ClientError: "connection lost",
    OSError: "connection lost",
    ValueError: "garbage",  # an event is not JSON or not UTF-8
    RecursionError: "garbage",
}
"""The reason for each exception; the first that fits counts, since some are subclasses of others."""


async def _stream(http: aiohttp.ClientSession, url: str, body: bytes, taker: "_StreamTimer", quiet_s: float) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(quiet_s) as patience, http.post(url, data=body, headers=_JSON) as response:
        if response.status != 200:
            said = (await response.content.read(MAX_SAID)).decode(errors="replace")
            raise BrokenStream(f"HTTP {response.status}", f"{response.status} {said}", response.status)
        if response.content_type not in _STREAMS:
            raise BrokenStream("garbage", f"it answers with {response.content_type}, not with a stream of events")
        async for line in response.content:
            if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                continue
            if taker.take(json.loads(data)):
                patience.reschedule(loop.time() + quiet_s)
            if taker.has_left:
                return
    taker.end()


class _StreamTimer:
    """The clock of one stream's events; it raises BrokenStream for what no good stream has."""

    def __init__(self, answer: StreamResult, start: float, max_tokens: int, leave_after: int | None) -> None:
        self._answer, self._last = answer, start
        self._max_tokens, self._leave_after = max_tokens, leave_after
        self._num_counted: int | None = None
        self._is_finished = False

    @property
    def has_left(self) -> bool:
        return self._leave_after is not None and self._answer.num_tokens >= self._leave_after

    def take(self, event: object) -> bool:
        """Return whether the event counts as a token.

        One that ends the answer and has no text does not, if others came before.
        """
        now, answer, choices = time.perf_counter(), self._answer, self._choices(event)
        if isinstance(event, dict) and isinstance(said := event.get("system_fingerprint"), str):
            answer.fingerprint = said
        self._is_finished = self._is_finished or any(choice.get("finish_reason") for choice in choices)
        answer.text += "".join(choice.get("text") or "" for choice in choices)
        is_end = all(choice.get("finish_reason") and not choice.get("text") for choice in choices)
        if not choices or (is_end and answer.num_tokens):
            return False
        if answer.num_tokens:
            answer.gaps_s.append(now - self._last)
        else:
            answer.ttft_s = now - self._last
        self._last, answer.num_tokens = now, answer.num_tokens + 1
        if answer.num_tokens > self._max_tokens + SPARE_EVENTS:
            raise BrokenStream("more than asked for", f"more than {self._max_tokens} tokens came")
        return True

    def end(self) -> None:
        if not self._is_finished:
            raise BrokenStream("no finish_reason", "the stream ended without a finish_reason")
        if self._num_counted == 0 or self._answer.num_tokens == 0:
            raise BrokenStream("no token", "the answer is complete and has no token")
        self._answer.num_tokens = self._num_counted or self._answer.num_tokens

    def _choices(self, event: object) -> list[dict]:
        if not isinstance(event, dict):
            raise BrokenStream("garbage", event)
        if event.get("error"):
            raise BrokenStream("error in the stream", event["error"])
        choices, usage = event.get("choices"), event.get("usage")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise BrokenStream("garbage", event)
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self._num_counted = usage["completion_tokens"]
        return choices


def session(total_s: float | None = 600.0, headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """Return an HTTP session with any number of connections.

    `total_s` is the longest that a request may take; None where `ask` gives up by itself.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=total_s),
        read_bufsize=1 << 20,
        headers=headers,
    )
