"""How an answer becomes bodies: the interface, and what its makers share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from contracts.errors import TandemError
from gateway.api.error_body import error_of
from gateway.generation.generation_state import OutputDelta, ShownToken
from gateway.generation.usage import Usage
from gateway.prompting.chat_template import Prompting


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

    def opening(self, index: int, usage: Usage) -> list[dict[str, Any]]:
        """Return what comes before the first chunk of an answer; nothing of it is in `usage`."""
        ...

    def chunk(self, piece: OutputDelta) -> list[dict[str, Any]]:
        """Empty: nothing to tell yet."""
        ...

    def choice(self, pieces: Sequence[OutputDelta]) -> dict[str, Any]:
        """Return the choice that all pieces of one answer make."""
        ...

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]: ...

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        """What follows the last chunk."""
        ...

    def failure(self, error: TandemError) -> dict[str, Any]:
        """Return the event that ends a stream."""
        ...

    def refusal(self, error: TandemError) -> dict[str, Any]:
        """Return the body of an error before anything was told."""
        ...

    def encode(self, body: dict[str, Any]) -> bytes: ...


Spelling = Callable[[int], str]
"""A token's name in log-probabilities, by its id."""


def finite(logprob: float) -> float:
    """JSON has no infinity; with vLLM's stand-in for it."""
    return max(logprob, -9999.0)


def spell_id(token_id: int) -> str:
    """Return the name that vLLM gives tokens for clients that can't tell them apart by text."""
    return f"token_id:{token_id}"


@dataclass(frozen=True)
class LogprobEntries:
    """How a chat or a response tells the log-probability of a token, and of the likeliest in its place."""

    prompting: Prompting
    spelling: Spelling

    def content(self, shown: ShownToken) -> dict[str, Any]:
        token = shown.token
        alternatives = [self._entry(token_id, logprob) for token_id, logprob in token.top_logprobs or ()]
        return self._entry(token.token_id, token.logprob or 0.0) | {"top_logprobs": alternatives}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.prompting.token_bytes(token_id)
        return {"token": self.spelling(token_id), "logprob": finite(logprob), "bytes": list(raw)}


def joined(pieces: Sequence[OutputDelta]) -> OutputDelta:
    """All pieces of an answer as one, without marks."""
    shown = tuple(item for piece in pieces for item in piece.shown)
    return replace(pieces[-1], text="".join(piece.text for piece in pieces), marks=(), shown=shown)


def ending_of(finish: str | None, stop_reason: str | int | None) -> dict[str, Any]:
    """Return the end of a choice; what it stopped at is told with it."""
    return {"finish_reason": finish} | ({} if finish is None else {"stop_reason": stop_reason})


class StreamedFormatter:
    """How chat and completions are streamed."""

    ending = b"data: [DONE]\n\n"
    reasoning_tokens = None

    def failure(self, error: TandemError) -> dict[str, Any]:
        return error_of(error)[1]

    def refusal(self, error: TandemError) -> dict[str, Any]:
        return error_of(error)[1]

    def encode(self, body: dict[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode(body) + b"\n\n"
