"""The bodies of /score and /rerank, as vLLM has them."""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from checkpoint.checkpoint import ScoreForm
from contracts.errors import TandemError
from gateway.api.response_formatter import StreamedFormatter
from gateway.generation.generation_state import OutputDelta
from gateway.generation.usage import Usage


@dataclass(frozen=True)
class ScoreFormatter(StreamedFormatter):
    """Scores in the order of their pairs, never in a stream.

    `parts`: the answers that make each, see gateway.prompting.score_prompts. `form`: of a classifier's; None for the
    cosine of two embeddings.
    """

    id: str
    model: str
    created: int
    parts: tuple[tuple[int, ...], ...]
    form: ScoreForm | None

    def opening(self, index: int, usage: Usage) -> list[dict[str, Any]]:
        return []

    def chunk(self, piece: OutputDelta) -> list[dict[str, Any]]:
        return []

    def choice(self, pieces: Sequence[OutputDelta]) -> dict[str, Any]:
        """Return what one prompt's worker sent. Raises TandemError if that is no row of numbers."""
        row = array("f", pieces[-1].embedding)
        if not row or not all(map(math.isfinite, row)):
            raise TandemError("a worker sent no score, or one that is no finite number")
        return {"index": pieces[-1].index, "row": row}

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        entries = [{"index": at, "object": "score", "score": score} for at, score in enumerate(self.scores(choices))]
        head = {"id": self.id, "object": "list", "created": self.created, "model": self.model}
        return {**head, "data": entries, "usage": _counts(usage)}

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        return []

    def scores(self, choices: list[dict[str, Any]]) -> list[float]:
        """Return the score of each pair."""
        rows: dict[int, Sequence[float]] = {choice["index"]: choice["row"] for choice in choices}
        make: Callable[..., float] = _cosine
        if self.form is not None:
            make = _sigmoid_of if self.form.is_sigmoid else _first_of
        return [make(*(rows[index] for index in part)) for part in self.parts]


@dataclass(frozen=True)
class RerankFormatter(ScoreFormatter):
    """The documents, the best first.

    `top_n`: so many of them; 0 for all.
    """

    documents: tuple[str, ...]
    top_n: int

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        entries = [
            {"index": index, "document": {"text": self.documents[index]}, "relevance_score": score}
            for index, score in enumerate(self.scores(choices))
        ]
        entries.sort(key=lambda entry: -entry["relevance_score"])
        results = entries[: self.top_n or len(entries)]
        return {"id": self.id, "model": self.model, "usage": _counts(usage), "results": results}


def _counts(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}


def _first_of(row: Sequence[float]) -> float:
    return row[0]


def _sigmoid_of(row: Sequence[float]) -> float:
    """Return 1 / (1 + exp(-x)), by the half of it that does not overflow."""
    small = math.exp(-abs(row[0]))
    return 1 / (1 + small) if row[0] >= 0 else small / (1 + small)


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0
