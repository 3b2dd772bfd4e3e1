"""Anthropic's Messages API: an answer as one message of content blocks, whole or as events."""

from dataclasses import dataclass, field

import msgspec

from contracts.errors import TandemError
from contracts.events import FinishReason
from gateway.api.anthropic.error_body import anthropic_error_of
from gateway.api.single_answer import Body, SingleAnswer
from gateway.generation.output_parser import OutputParserSpec
from gateway.generation.usage import Usage
from gateway.tool_calling.events import ContentDelta, ReasoningDelta


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
            return {"type": self.type, **self.head, "input": _input(text)}
        return {"type": self.type, self.type: text, **self.head}


def _input(text: str) -> Body:
    """Return a call's arguments.

    What JSON can't carry on, such as half a surrogate pair, comes as it was written.
    """
    try:
        return msgspec.json.decode(text) if text else {}
    except msgspec.DecodeError:
        return {"raw": text}


class MessagesFormatter(SingleAnswer):
    """Bodies and events of one message; owned by the one who writes it, because its blocks are numbered.

    `max_tokens`: what the client allows. `reading`: see SingleAnswer. `tells_thoughts`: whether the client wants them.
    """

    ending = b""

    def __init__(
        self, id: str, model: str, max_tokens: int, reading: OutputParserSpec | None, tells_thoughts: bool
    ) -> None:
        super().__init__(reading)
        self.id, self._model, self._max_tokens, self._tells_thoughts = id, model, max_tokens, tells_thoughts
        self._blocks: list[ContentBlock] = []
        self._is_open = False

    def opening(self, index: int, usage: Usage) -> list[Body]:
        return [{"type": "message_start", "message": self._message([], usage)}]

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

    def _more(self, event: ReasoningDelta | ContentDelta) -> list[Body]:
        kind = "thinking" if isinstance(event, ReasoningDelta) else "text"
        if kind == "thinking" and not self._tells_thoughts:
            return []
        goes_on = self._is_open and self._blocks[-1].type == kind and not event.parting
        begun = [] if goes_on else self._begin(kind, {"signature": ""} if kind == "thinking" else {})
        return [*begun, *self._more_arguments(event.text)]

    def _begin_call(self, name: str, call_id: str) -> list[Body]:
        return self._begin("tool_use", {"id": call_id, "name": name})

    def _more_arguments(self, text: str) -> list[Body]:
        return [self._event("content_block_delta", delta=self._blocks[-1].delta(text))]

    def _end_call(self, is_whole: bool) -> list[Body]:
        return self._close()

    def _begin(self, kind: str, head: Body) -> list[Body]:
        closed = self._close()
        self._blocks.append(ContentBlock(kind, head))
        self._is_open = True
        return [*closed, self._event("content_block_start", content_block=self._blocks[-1].opened())]

    def _close(self) -> list[Body]:
        """End the last block, unless that has happened."""
        was_open, self._is_open = self._is_open, False
        return [self._event("content_block_stop")] if was_open else []

    def _event(self, kind: str, **facts: Body) -> Body:
        return {"type": kind, "index": len(self._blocks) - 1, **facts}

    def _stop(self) -> Body:
        last = self._last
        if last is not None and last.finish == FinishReason.LENGTH:
            is_spent = last.num_tokens >= self._max_tokens
            return _stopped("max_tokens" if is_spent else "model_context_window_exceeded")
        if last is not None and isinstance(last.stop_reason, str):
            return _stopped("stop_sequence", last.stop_reason)
        return _stopped("tool_use" if self.has_called else "end_turn")

    def _message(self, content: list[Body], usage: Usage) -> Body:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }


def _stopped(reason: str, sequence: str | None = None) -> Body:
    return {"stop_reason": reason, "stop_sequence": sequence}


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
