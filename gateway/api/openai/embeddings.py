"""The body of /v1/embeddings."""

import base64
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contracts.errors import TandemError
from gateway.api.response_formatter import StreamedFormatter
from gateway.generation.generation_state import OutputDelta
from gateway.generation.usage import Usage


@dataclass(frozen=True)
class EmbeddingFormatter(StreamedFormatter):
    """Embeddings in the order of their texts, never in a stream.

    `dimensions`: only so many of each, the first; 0 for all. `is_normalized`: what is told has length 1.
    """

    id: str
    model: str
    created: int
    dimensions: int
    is_normalized: bool
    is_base64: bool

    def opening(self, index: int, usage: Usage) -> list[dict[str, Any]]:
        return []

    def chunk(self, piece: OutputDelta) -> list[dict[str, Any]]:
        return []

    def choice(self, pieces: Sequence[OutputDelta]) -> dict[str, Any]:
        """Return the embedding of one text. Raises TandemError if its worker sent none."""
        values = array("f", pieces[-1].embedding)
        if not values or not all(map(math.isfinite, values)):
            raise TandemError("a worker sent no embedding, or one that has no finite numbers")
        if self.dimensions:
            values = values[: self.dimensions]
        if self.is_normalized:
            length = math.hypot(*values) or 1.0
            values = array("f", [value / length for value in values])
        told = base64.b64encode(values).decode() if self.is_base64 else values.tolist()
        return {"object": "embedding", "index": pieces[-1].index, "embedding": told}

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return {"object": "list", "data": choices, "model": self.model, "usage": counts}

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        return []
