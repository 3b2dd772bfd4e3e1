"""The bodies of /v1/completions, whole and in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contracts.events import Token
from gateway.api.response_formatter import Spelling, StreamedFormatter, ending_of, finite, joined
from gateway.generation.generation_state import OutputDelta, ShownToken
from gateway.generation.usage import Usage


@dataclass(frozen=True)
class CompletionFormatter(StreamedFormatter):
    """The same for /v1/completions."""

    id: str
    model: str
    created: int
    has_logprobs: bool
    spelling: Spelling
    fingerprint: str = ""

    def opening(self, index: int, usage: Usage) -> list[dict[str, Any]]:
        return []

    def chunk(self, piece: OutputDelta) -> list[dict[str, Any]]:
        head = self._head() if piece.finish is None else self._last()
        return [head | {"choices": [self._choice(piece)]}]

    def choice(self, pieces: Sequence[OutputDelta]) -> dict[str, Any]:
        return self._choice(joined(pieces))

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self._last() | {"choices": choices, "usage": usage.body()}

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        return [self.whole([], usage)] if include_usage else []

    def _choice(self, piece: OutputDelta) -> dict[str, Any]:
        logprobs = self._logprobs(piece.shown)
        ending = ending_of(piece.finish, piece.stop_reason)
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, **ending}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _last(self) -> dict[str, Any]:
        return self._head() | {"system_fingerprint": self.fingerprint}

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
