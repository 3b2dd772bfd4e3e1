"""Anthropic's Messages API: an answer as one message of content blocks, whole or as events."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from contracts.errors import TandemError
from contracts.events import FinishReason
from gateway.api.anthropic.error_body import anthropic_error_of
from gateway.generation.generation_state import OutputDelta
from gateway.generation.output_parser import OutputParserSpec
from gateway.generation.usage import Usage
from gateway.tool_calling.events import (
    ContentDelta,
    MalformedToolCall,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
    said_if_broken,
)

Body = dict[str, Any]


@dataclass
class ContentBlock:
    """A block of a message; `type` is `text`, `thinking` or `tool_use`, `parts` what has come of it."""

    type: str
    head: Body
    parts: list[str] = field(default_factory=list)

    def opened(self) -> Body:
        """Return the block as a stream begins it."""
        return self._body("")

    def delta(self, text: str) -> Body:
        """Add to the block, and return what a stream tells of that."""
        self.parts.append(text)
        if self.type == "tool_use":
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": f"{self.type}_delta", self.type: text}

    def whole(self) -> Body:
        return self._body("".join(self.parts))

    def _body(self, text: str) -> Body:
        if self.type == "tool_use":
            return {"type": self.type, **self.head, "input": msgspec.json.decode(text) if text else {}}
        return {"type": self.type, self.type: text, **self.head}


@dataclass
class MessagesFormatter:
    """Bodies and events of one message; owned by the one who writes it, because its blocks are numbered.

    `max_tokens`: what the client allows. `reading`: how the answer is read; None if all of it is said.
    `tells_thoughts`: whether the client wants them.
    """

    id: str
    model: str
    max_tokens: int
    reading: OutputParserSpec | None = None
    tells_thoughts: bool = True
    ending: bytes = b""
    _blocks: list[ContentBlock] = field(default_factory=list)
    _is_open: bool = False
    _last: OutputDelta | None = None

    def __post_init__(self) -> None:
        self._read = None if self.reading is None else self.reading.begin()

    @property
    def reasoning_tokens(self) -> int | None:
        if self._read is None or self.reading is None or self.reading.thinking is None:
            return None
        return self._read.num_thought

    def opening(self, index: int, usage: Usage) -> list[Body]:
        return [{"type": "message_start", "message": self._message([], usage)}]

    def chunk(self, piece: OutputDelta) -> list[Body]:
        return [body for event in self._events(piece) for body in self._told(event)]

    def choice(self, pieces: Sequence[OutputDelta]) -> Body:
        events = [event for piece in pieces for event in self._events(piece)]
        for event in said_if_broken(events):
            self._told(event)
        return {}

    def whole(self, choices: list[Body], usage: Usage) -> Body:
        return self._message([block.whole() for block in self._blocks], usage) | self._stop()

    def closing(self, usage: Usage, include_usage: bool) -> list[Body]:
        ending = {"type": "message_delta", "delta": self._stop(), "usage": _usage(usage)}
        return [*self._close(), ending, {"type": "message_stop"}]

    def failure(self, error: TandemError) -> Body:
        return anthropic_error_of(error)

    def refusal(self, error: TandemError) -> Body:
        return anthropic_error_of(error)

    def encode(self, body: Body) -> bytes:
        return b"event: %s\ndata: %s\n\n" % (body["type"].encode(), msgspec.json.encode(body))

    def _events(self, piece: OutputDelta) -> list[OutputEvent]:
        self._last = piece
        return [ContentDelta(piece.text)] if self._read is None else self._read.feed(piece)

    def _told(self, event: OutputEvent) -> list[Body]:
        if isinstance(event, ReasoningDelta):
            return self._more("thinking", event) if event.text and self.tells_thoughts else []
        if isinstance(event, ContentDelta):
            return self._more("text", event) if event.text else []
        if self.reading is None or not self.reading.is_wanted(event.index):
            return self._more("text", ContentDelta(event.text)) if isinstance(event, MalformedToolCall) else []
        match event:
            case ToolCallStarted():
                assert self.reading.form is not None, "nothing is read as a call without a form"
                return self._begin("tool_use", {"id": self.reading.form.new_id(), "name": event.name})
            case ToolCallArguments():
                return self._add(event.text)
            case ToolCallFinished() | MalformedToolCall():  # in a stream: what came of it was told, and is none
                return self._close()

    def _more(self, kind: str, event: ReasoningDelta | ContentDelta) -> list[Body]:
        goes_on = self._is_open and self._blocks[-1].type == kind and not event.parting
        begun = [] if goes_on else self._begin(kind, {"signature": ""} if kind == "thinking" else {})
        return [*begun, *self._add(event.text)]

    def _begin(self, kind: str, head: Body) -> list[Body]:
        closed = self._close()
        self._blocks.append(ContentBlock(kind, head))
        self._is_open = True
        return [*closed, self._event("content_block_start", content_block=self._blocks[-1].opened())]

    def _add(self, text: str) -> list[Body]:
        return [self._event("content_block_delta", delta=self._blocks[-1].delta(text))]

    def _close(self) -> list[Body]:
        """End the last block, unless that has happened."""
        was_open, self._is_open = self._is_open, False
        return [self._event("content_block_stop")] if was_open else []

    def _event(self, kind: str, **facts: Any) -> Body:
        return {"type": kind, "index": len(self._blocks) - 1, **facts}

    def _stop(self) -> Body:
        reason, sequence, last = "end_turn", None, self._last
        if last is not None and last.finish == FinishReason.LENGTH:
            reason = "max_tokens" if last.num_tokens >= self.max_tokens else "model_context_window_exceeded"
        elif last is not None and isinstance(last.stop_reason, str):
            reason, sequence = "stop_sequence", last.stop_reason
        elif self._read is not None and self._read.has_called:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _message(self, content: list[Body], usage: Usage) -> Body:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }


def _usage(usage: Usage) -> Body:
    """Return the counts as Anthropic has them: `input_tokens` are those that no cache had."""
    counts: Body = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts
