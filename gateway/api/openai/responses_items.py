"""Items of a response's output, and the events that tell how they come."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.tool_calling.custom_tools import input_of

Body = dict[str, Any]


@dataclass
class OutputItem:
    """`index`: its place in the output. `texts`: what has come of it."""

    id: str
    index: int
    status: str = field(default="in_progress", init=False)
    texts: list[str] = field(default_factory=list, init=False)

    @property
    def is_open(self) -> bool:
        return self.status == "in_progress"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def place(self) -> Body:
        return {"item_id": self.id, "output_index": self.index}

    def body(self) -> Body:
        return {"id": self.id, "status": self.status}

    def added(self) -> list[Body]:
        return [{"type": "response.output_item.added", "output_index": self.index, "item": self.body()}]

    def delta(self, text: str) -> Body:
        self.texts.append(text)
        return {"delta": text, **self.place}

    def done(self, status: str) -> list[Body]:
        self.status = status
        return [{"type": "response.output_item.done", "output_index": self.index, "item": self.body()}]


@dataclass
class MessageItem(OutputItem):
    """A message, or the reasoning before it. `logprobs`: of its tokens, if the client wants them."""

    is_thought: bool
    logprobs: list[Body] = field(default_factory=list, init=False)

    @property
    def place(self) -> Body:
        return super().place | {"content_index": 0}

    def body(self) -> Body:
        own = {"type": "reasoning", "summary": []} if self.is_thought else {"type": "message", "role": "assistant"}
        return super().body() | own | {"content": [] if self.is_open else [self._part]}

    def added(self) -> list[Body]:
        return [*super().added(), {"type": "response.content_part.added", "part": self._part, **self.place}]

    def delta(self, text: str, logprobs: Sequence[Body] = ()) -> Body:
        self.logprobs += logprobs
        return {"type": f"{self._kind}.delta", **super().delta(text), **self._told(logprobs)}

    def done(self, status: str) -> list[Body]:
        return [
            {"type": f"{self._kind}.done", "text": self.text, **self._told(self.logprobs), **self.place},
            {"type": "response.content_part.done", "part": self._part, **self.place},
            *super().done(status),
        ]

    @property
    def _part(self) -> Body:
        if self.is_thought:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    @property
    def _kind(self) -> str:
        return "response.reasoning_text" if self.is_thought else "response.output_text"

    def _told(self, logprobs: Sequence[Body]) -> Body:
        return {} if self.is_thought else {"logprobs": list(logprobs)}


@dataclass
class FunctionCallItem(OutputItem):
    """A call of a function. `call_id`: by which the client tells its result."""

    call_id: str
    name: str

    def body(self) -> Body:
        own = {"type": "function_call", "call_id": self.call_id, "name": self.name, "arguments": self.text}
        return super().body() | own

    def delta(self, text: str) -> Body:
        return {"type": "response.function_call_arguments.delta", **super().delta(text)}

    def done(self, status: str) -> list[Body]:
        told = {"type": "response.function_call_arguments.done", "name": self.name, "arguments": self.text}
        return [told | self.place, *super().done(status)]


@dataclass
class CustomCallItem(OutputItem):
    """A call of a tool that takes free text.

    The model writes it as the one argument of a function: `texts` is JSON, and is told as text once it is whole.
    """

    call_id: str
    name: str

    @property
    def input(self) -> str:
        return input_of(self.text)

    def body(self) -> Body:
        told = "" if self.is_open else self.input
        return super().body() | {"type": "custom_tool_call", "call_id": self.call_id, "name": self.name, "input": told}

    def delta(self, text: str) -> Body:
        self.texts.append(text)
        return {}

    def done(self, status: str) -> list[Body]:
        kind = "response.custom_tool_call_input"
        told = [
            {"type": f"{kind}.delta", "delta": self.input, **self.place},
            {"type": f"{kind}.done", "input": self.input, **self.place},
        ]
        return [*told, *super().done(status)]
