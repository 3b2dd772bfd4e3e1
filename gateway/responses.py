"""OpenAI's Responses API, as far as nothing has to be stored: one answer to what `input` holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from contracts.errors import RequestError, TandemError
from contracts.events import FinishReason
from gateway.answer import Shown
from gateway.replies import Usage, error_of
from gateway.schema import ChatRequest, Message, ResponsesRequest

_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


def to_chat(request: ResponsesRequest) -> ChatRequest:
    """The same as a conversation. Raises RequestError on what is not text."""
    shared = {
        name: getattr(request, name) for name in request.__struct_fields__ if name in ChatRequest.__struct_fields__
    }
    given = request.input
    said = [Message(role="user", content=given)] if isinstance(given, str) else _messages(given)
    if not said:
        raise RequestError("'input' is empty", "input")
    system = [] if request.instructions is None else [Message(role="system", content=request.instructions)]
    return ChatRequest(**shared, messages=[*system, *said], max_completion_tokens=request.max_output_tokens)


def _messages(items: Sequence[dict[str, Any]]) -> list[Message]:
    return [_message(item, f"input[{index}]") for index, item in enumerate(items)]


def _message(item: dict[str, Any], at: str) -> Message:
    if (kind := item.get("type", "message")) != "message":
        raise RequestError(f"an item of type {kind!r} is not supported, only 'message'", f"{at}.type")
    content = item.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{at}.content[{index}]") for index, part in enumerate(content))
    if content is None:
        raise RequestError("a message needs 'content'", f"{at}.content")
    try:
        return msgspec.convert({"role": item.get("role"), "content": content}, Message)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise RequestError(f"{at}: {message}", at + path.rstrip("`")) from error


def _part(part: Any, at: str) -> str:
    if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
        kind = part.get("type") if isinstance(part, dict) else part
        raise RequestError(f"content of type {kind!r} is not supported, only 'input_text'", at)
    if not isinstance(part.get("text"), str):
        raise RequestError("a text part needs 'text', a string", f"{at}.text")
    return part["text"]


@dataclass
class ResponseReplies:
    """Bodies and events of one response; owned by the one who writes it, because its events are numbered."""

    id: str
    model: str
    created: int
    request: ResponsesRequest
    ending: bytes = b""
    _texts: list[str] = field(default_factory=list)
    _finish: str = FinishReason.STOP
    _num_events: int = 0

    def opening(self, index: int) -> list[dict[str, Any]]:
        started = self._body("in_progress", [], None)
        empty = self._item("in_progress", "") | {"content": []}
        return [
            {"type": "response.created", "response": started},
            {"type": "response.in_progress", "response": started},
            {"type": "response.output_item.added", "output_index": 0, "item": empty},
            {"type": "response.content_part.added", "part": _text(""), **self._place},
        ]

    def chunk(self, index: int, text: str, shown: Sequence[Shown], finish: str | None) -> dict[str, Any]:
        self._texts.append(text)
        self._finish = finish or self._finish
        return {"type": "response.output_text.delta", "delta": text, "logprobs": [], **self._place}

    def choice(self, index: int, text: str, shown: Sequence[Shown], finish: str) -> dict[str, Any]:
        self._finish = finish
        return self._item(self._status, text)

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self._body(self._status, choices, usage)

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        text = "".join(self._texts)
        item = self._item(self._status, text)
        return [
            {"type": "response.output_text.done", "text": text, "logprobs": [], **self._place},
            {"type": "response.content_part.done", "part": _text(text), **self._place},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": f"response.{self._status}", "response": self._body(self._status, [item], usage)},
        ]

    def failure(self, error: TandemError) -> dict[str, Any]:
        status, body = error_of(error)
        return {"type": "error", "code": str(status), "message": body["error"]["message"], "param": None}

    def encode(self, body: dict[str, Any]) -> bytes:
        numbered = body | {"sequence_number": self._num_events}
        self._num_events += 1
        return b"event: %s\ndata: %s\n\n" % (body["type"].encode(), msgspec.json.encode(numbered))

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == FinishReason.LENGTH else "completed"

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    @property
    def _item_id(self) -> str:
        return f"msg_{self.id}"

    def _item(self, status: str, text: str) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": [_text(text)]}

    def _body(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        asked = self.request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
