"""How many tokens a request has cost."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Usage:
    """`reasoning_tokens`: of the completion; None if the model is not known to think aloud.

    `accepted_tokens` of the completion were guessed by speculative decoding, `rejected_tokens` were guessed in vain.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    accepted_tokens: int = 0
    rejected_tokens: int = 0

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if details := self._details():
            body["completion_tokens_details"] = details
        return body

    def _details(self) -> dict[str, int]:
        details = {} if self.reasoning_tokens is None else {"reasoning_tokens": self.reasoning_tokens}
        if self.accepted_tokens or self.rejected_tokens:
            details["accepted_prediction_tokens"] = self.accepted_tokens
            details["rejected_prediction_tokens"] = self.rejected_tokens
        return details
