"""Chat's bodies where the answer may call tools."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contracts.errors import TandemError
from contracts.events import FinishReason
from gateway.answer import Shown
from gateway.replies import ChatReplies, Replies, Usage
from gateway.schema import ChatRequest
from gateway.tools.events import Argued, Broken, Called, Closed, Event, Said
from gateway.tools.form import Form
from gateway.tools.parser import CallParser
from gateway.tools.request import Calling, calling_of


def with_tools(chat: ChatReplies, asked: ChatRequest, form: Form | None) -> Replies:
    """`chat`, if nothing is to be called."""
    calling = calling_of(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    return chat if calling is None or form is None else ToolReplies(chat, calling, form)


@dataclass
class Spoken:
    """One choice of a stream so far."""

    parser: CallParser
    has_called: bool = False


@dataclass
class ToolReplies:
    """As ChatReplies, with calls told from text. Owned by the one who writes it, who feeds each choice in order."""

    chat: ChatReplies
    calling: Calling
    form: Form
    _spoken: dict[int, Spoken] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.chat.id

    @property
    def ending(self) -> bytes:
        return self.chat.ending

    def opening(self, index: int) -> list[dict[str, Any]]:
        """`content` is null: whether there will be any is not known."""
        return [self.chat.delta(index, {"role": "assistant", "content": None}, (), None)]

    def chunk(self, index: int, text: str, shown: Sequence[Shown], finish: str | None) -> dict[str, Any] | None:
        """None while all of it is held back."""
        spoken = self._spoken.setdefault(index, Spoken(self._parser()))
        events = spoken.parser.feed(text) + ([] if finish is None else spoken.parser.finish())
        spoken.has_called |= any(isinstance(event, Closed) and self._is_wanted(event.index) for event in events)
        delta = self._delta(events)
        if not delta and not shown and finish is None:
            return None
        return self.chat.delta(index, delta, shown, _finish(finish, spoken.has_called))

    def choice(self, index: int, text: str, shown: Sequence[Shown], finish: str) -> dict[str, Any]:
        parser = self._parser()
        events = parser.feed(text) + parser.finish()
        calls = self._calls(events)
        message = {"role": "assistant", "content": _content(events, bool(calls)), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return self.chat.message(index, message, shown, _finish(finish, bool(calls)) or finish)

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self.chat.whole(choices, usage)

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        return self.chat.closing(usage, include_usage)

    def failure(self, error: TandemError) -> dict[str, Any]:
        return self.chat.failure(error)

    def encode(self, body: dict[str, Any]) -> bytes:
        return self.chat.encode(body)

    def _parser(self) -> CallParser:
        return self.form.parser({function.name for function in self.calling.functions.values()})

    def _delta(self, events: list[Event]) -> dict[str, Any]:
        """At most one entry a call: not every client adds up several of one chunk."""
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            match event:
                case Called():
                    calls[event.index] = {"index": event.index, **self._call(event.name)}
                case Argued():
                    more = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
                    more["function"]["arguments"] += event.text
        wanted = [call for index, call in calls.items() if self._is_wanted(index)]
        content = "".join(event.text for event in events if isinstance(event, Said))
        return ({"content": content} if content else {}) | ({"tool_calls": wanted} if wanted else {})

    def _calls(self, events: list[Event]) -> list[dict[str, Any]]:
        """The complete ones."""
        calls: dict[int, dict[str, Any]] = {}
        closed: list[dict[str, Any]] = []
        for event in events:
            match event:
                case Called():
                    calls[event.index] = self._call(event.name)
                case Argued():
                    calls[event.index]["function"]["arguments"] += event.text
                case Closed() if self._is_wanted(event.index):
                    closed.append(calls[event.index])
        return closed

    def _call(self, name: str) -> dict[str, Any]:
        return {"id": self.form.new_id(), "type": "function", "function": {"name": name, "arguments": ""}}

    def _is_wanted(self, index: int) -> bool:
        return self.calling.in_parallel or index == 0


def _content(events: list[Event], has_called: bool) -> str | None:
    """What is no call is said. Null beside calls if that is nothing."""
    content = "".join(event.text for event in events if isinstance(event, Said | Broken))
    return content or (None if has_called else "")


def _finish(finish: str | None, has_called: bool) -> str | None:
    return "tool_calls" if has_called and finish == FinishReason.STOP else finish
