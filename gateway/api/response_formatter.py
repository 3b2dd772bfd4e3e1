"""OpenAI's response bodies: chat and text, whole and in chunks, and the error shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from contracts.errors import TandemError
from contracts.events import Token
from gateway.error_codes import status_of
from gateway.generation.generation_state import OutputDelta, ShownToken
from gateway.prompting.chat_template import Prompting

_TYPE = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    413: "BadRequestError",
    415: "BadRequestError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}

OUR_FAULT = "internal error; see the gateway's log"


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPE.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_of(error: TandemError) -> tuple[int, dict[str, Any]]:
    status = status_of(error.code)
    return status, error_body(status, str(error), getattr(error, "param", None))


def retry_headers(error: TandemError) -> dict[str, str]:
    """When to come again, in whole seconds, for what is refused because of load or of a worker that is gone."""
    if status_of(error.code) not in (429, 503):
        return {}
    return {"Retry-After": str(max(1, round(getattr(error, "retry_after_s", 1.0))))}


@dataclass(frozen=True)
class Usage:
    """`reasoning_tokens`: of the completion; None if the model is not known to think aloud."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return body


class ResponseFormatter(Protocol):
    """The bodies of one request's answer, whole or as the events of a stream that `ending` ends."""

    @property
    def id(self) -> str: ...

    @property
    def ending(self) -> bytes: ...

    @property
    def reasoning_tokens(self) -> int | None:
        """How many tokens of the pieces so far were reasoning; None if the model is not known to think aloud."""
        ...

    def opening(self, index: int) -> list[dict[str, Any]]: ...

    def chunk(self, piece: OutputDelta) -> list[dict[str, Any]]:
        """Empty: nothing to tell yet."""
        ...

    def choice(self, pieces: Sequence[OutputDelta]) -> dict[str, Any]:
        """Of all pieces of one answer."""
        ...

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]: ...

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        """What follows the last chunk."""
        ...

    def failure(self, error: TandemError) -> dict[str, Any]: ...

    def encode(self, body: dict[str, Any]) -> bytes: ...


Spelling = Callable[[int], str]
"""A token's name in log-probabilities, by its id."""


def finite(logprob: float) -> float:
    """JSON has no infinity; with vLLM's stand-in for it."""
    return max(logprob, -9999.0)


def spell_id(token_id: int) -> str:
    """As vLLM names tokens for those who can't tell them apart by text."""
    return f"token_id:{token_id}"


def joined(pieces: Sequence[OutputDelta]) -> OutputDelta:
    """All pieces of an answer as one, without marks."""
    shown = tuple(item for piece in pieces for item in piece.shown)
    return replace(pieces[-1], text="".join(piece.text for piece in pieces), marks=(), shown=shown)


def _ending(finish: str | None, stop_reason: str | int | None) -> dict[str, Any]:
    """Of a choice. What it stopped at is told with its end."""
    return {"finish_reason": finish} | ({} if finish is None else {"stop_reason": stop_reason})


class _Stream:
    """How chat and completions are streamed."""

    ending = b"data: [DONE]\n\n"
    reasoning_tokens = None

    def failure(self, error: TandemError) -> dict[str, Any]:
        return error_of(error)[1]

    def encode(self, body: dict[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode(body) + b"\n\n"


@dataclass(frozen=True)
class ChatFormatter(_Stream):
    """`id` is the response's; `created` seconds since the epoch; `spelling`: of tokens in log-probabilities."""

    id: str
    model: str
    created: int
    prompting: Prompting
    has_logprobs: bool
    spelling: Spelling

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [self.delta(index, {"role": "assistant", "content": ""}, (), None)]

    def chunk(self, piece: OutputDelta) -> list[dict[str, Any]]:
        delta = {"content": piece.text} if piece.text or piece.finish is None else {}
        return [self.delta(piece.index, delta, piece.shown, piece.finish, piece.stop_reason)]

    def choice(self, pieces: Sequence[OutputDelta]) -> dict[str, Any]:
        whole = joined(pieces)
        message = {"role": "assistant", "content": whole.text, "refusal": None}
        return self.message(whole.index, message, whole.shown, whole.finish, whole.stop_reason)

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self._head("chat.completion") | {"choices": choices, "usage": usage.body()}

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        return [self._head("chat.completion.chunk") | {"choices": [], "usage": usage.body()}] if include_usage else []

    def delta(
        self,
        index: int,
        delta: dict[str, Any],
        shown: Sequence[ShownToken],
        finish: str | None,
        stop_reason: str | int | None = None,
    ) -> dict[str, Any]:
        """A chunk that adds `delta` to the message."""
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(shown), **_ending(finish, stop_reason)}
        return self._head("chat.completion.chunk") | {"choices": [choice]}

    def message(
        self,
        index: int,
        message: dict[str, Any],
        shown: Sequence[ShownToken],
        finish: str | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        """A choice whose message is `message`."""
        return {"index": index, "message": message, "logprobs": self._logprobs(shown), **_ending(finish, stop_reason)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self, shown: Sequence[ShownToken]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        return {"content": [self._content(item) for item in shown], "refusal": None}

    def _content(self, shown: ShownToken) -> dict[str, Any]:
        token = shown.token
        alternatives = [self._entry(token_id, logprob) for token_id, logprob in token.top_logprobs or ()]
        return self._entry(token.token_id, token.logprob or 0.0) | {"top_logprobs": alternatives}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.prompting.token_bytes(token_id)
        return {"token": self.spelling(token_id), "logprob": finite(logprob), "bytes": list(raw)}


@dataclass(frozen=True)
class CompletionFormatter(_Stream):
    """The same for /v1/completions."""

    id: str
    model: str
    created: int
    has_logprobs: bool
    spelling: Spelling

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def chunk(self, piece: OutputDelta) -> list[dict[str, Any]]:
        return [self._head() | {"choices": [self._choice(piece)]}]

    def choice(self, pieces: Sequence[OutputDelta]) -> dict[str, Any]:
        return self._choice(joined(pieces))

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self._head() | {"choices": choices, "usage": usage.body()}

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        return [self.whole([], usage)] if include_usage else []

    def _choice(self, piece: OutputDelta) -> dict[str, Any]:
        logprobs = self._logprobs(piece.shown)
        ending = _ending(piece.finish, piece.stop_reason)
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, **ending}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _logprobs(self, shown: Sequence[ShownToken]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        return {
            "tokens": [self.spelling(item.token.token_id) for item in shown],
            "token_logprobs": [_known(item.token.logprob) for item in shown],
            "top_logprobs": [self._top(item.token) for item in shown],
            "text_offset": [item.offset for item in shown],
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        """The likeliest, and the token itself beside them. Of tokens that are spelled alike, the likeliest."""
        if token.top_logprobs is None:
            return None
        top: dict[str, float] = {}
        for token_id, value in (*token.top_logprobs, (token.token_id, token.logprob or 0.0)):
            top.setdefault(self.spelling(token_id), finite(value))
        return top


def _known(logprob: float | None) -> float | None:
    """None: the first token of a prompt has none."""
    return None if logprob is None else finite(logprob)
