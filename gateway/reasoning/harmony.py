"""OpenAI's harmony, which gpt-oss writes: messages, each with a header that names its channel.

`<|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>`. A call is a
message to `functions.NAME`, ended by `<|call|>`. https://github.com/openai/harmony, docs/format.md
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.grammar.lark_text import terms
from gateway.reasoning.reasoning_format import GRAMMAR
from gateway.tool_calling.call_parser import CallParser, object_of
from gateway.tool_calling.events import (
    ContentDelta,
    MalformedToolCall,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from gateway.tool_calling.tool_format import ToolFormat

MAX_HEADER_CHARS = 512

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN)
_ENDS = (_END, _CALL, _RETURN, _START)
"""What ends a message; by the last another begins though none was ended, and so it does by a channel."""
_HEADS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, "to=", " to=")
"""A header begins with one of them: its first message's role is in the prompt already."""
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."


class HarmonyCalls(CallParser):
    """Never fed: a HarmonyParser reads calls itself."""

    opening = _CHANNEL


FORM = ToolFormat(
    parser=HarmonyCalls,
    begin="",
    join="",
    end="",
    markers=_MARKERS,
    before=f"{_CHANNEL}commentary to={_FUNCTIONS}",
    between=f" {_CONSTRAIN}json{_MESSAGE}",
    after="",
    answer=f"{_CHANNEL}final{_MESSAGE}",
    needs_all_fields=True,
)


class Harmony:
    """A ReasoningFormat."""

    markers = _MARKERS
    ends = (_CALL, _RETURN)
    headers = (*_ENDS, _CHANNEL, _CONSTRAIN)
    calls = FORM
    efforts = ("low", "medium", "high")
    thought_end = ""

    def begun(self, prompt: str, final: str) -> str:
        """The header of the message that is open, if one is."""
        _, found, message = prompt.rpartition(_START)
        header, opened, said = message.partition(_MESSAGE)
        return header if found and opened and not any(end in said for end in (*_ENDS, _CHANNEL)) else ""

    def reader(self, begun: str, calls: CallParser | None) -> "HarmonyParser":
        return HarmonyParser(begun, calls)

    def before_grammar(self, begun: str, token_ids: Mapping[str, int], is_headed: bool) -> Sequence[str]:
        """Thoughts, and words about the calls that are to come."""
        if begun:
            return []
        begin, message = terms(_CHANNEL, token_ids), terms(_MESSAGE, token_ids)
        end = terms(f"{_END}{_START}assistant", token_ids)
        head = "" if is_headed else terms(FORM.answer, token_ids)
        return [
            f"start: thought* {head} @{GRAMMAR}",
            f'thought: {begin} ("analysis" | "commentary") {message} inner',
            f"inner: TEXT {end}",
            "TEXT: /(.|\\n)*/",
        ]

    def remembered(self, message: dict[str, Any], reasoning: str) -> dict[str, Any]:
        """Its template knows thoughts and words beside a call as one, and takes only one of them."""
        if "tool_calls" not in message or not message["content"]:
            return message | {"thinking": reasoning}
        return message | {"thinking": f"{reasoning}\n\n{message['content']}", "content": ""}


class HarmonyParser:
    """A ReasoningParser.

    Analysis is thought, and so is what is said to anything but a function of the client's; the other channels are said.
    Messages of one kind are parted by a newline. What has no header is said, to the letter.
    """

    def __init__(self, begun: str, calls: CallParser | None) -> None:
        self._names = None if calls is None else calls.names
        self._events: list[OutputEvent] = []
        self._header: str | None = ""  # None: in a message
        self._kind: type[ReasoningDelta | ContentDelta] | None = None  # None: in a call
        self._told: set[type[ReasoningDelta | ContentDelta]] = set()
        self._parting = ""
        self._arguments: list[str] = []
        self._num_calls = 0
        if begun:
            self._open(begun)

    @property
    def is_thinking(self) -> bool:
        return self._header is None and self._kind is ReasoningDelta

    def feed(self, text: str) -> list[OutputEvent]:
        if self._header is None:
            self._tell(text)
        else:
            self._head(text)
        return self._taken()

    def mark(self, marker: str) -> list[OutputEvent]:
        if self._header is not None and marker == _MESSAGE:
            self._open(self._header)
        elif marker in _ENDS or (self._header is None and marker == _CHANNEL):
            self._end()
            self._header = marker if marker in (_START, _CHANNEL) else ""
        elif self._header is not None:
            self._head(marker)
        else:
            self._tell(marker)
        return self._taken()

    def finish(self, is_cut: bool) -> list[OutputEvent]:
        """Say the rest, but nothing of a header or of what may have become one."""
        if self._header is None:
            self._end(is_cut)
        elif not is_cut and not self._header.startswith(_HEADS):
            self._say(self._header)
        return self._taken()

    def _head(self, text: str) -> None:
        """More of a header, unless it can be none any more: then it is said."""
        self._header = f"{self._header}{text}"
        if len(self._header) > MAX_HEADER_CHARS or not _may_begin(self._header):
            self._say(self._header)

    def _open(self, header: str) -> None:
        """What comes now is thought, said or called."""
        self._header, self._kind, self._arguments = None, None, []
        recipient = match[1] if (match := _RECIPIENT.search(header)) is not None else ""
        channel = header.rpartition(_CHANNEL)[2].strip()
        name = recipient.removeprefix(_FUNCTIONS)
        if self._names is not None and name and (recipient != name or name in self._names):
            self._events.append(ToolCallStarted(self._num_calls, name))
            self._num_calls += 1
            return
        self._kind = ReasoningDelta if recipient or channel.startswith("analysis") else ContentDelta
        self._parting = "\n" if self._kind in self._told else ""

    def _say(self, text: str) -> None:
        self._header, self._kind, self._parting = None, ContentDelta, ""
        self._tell(text)

    def _tell(self, text: str) -> None:
        if not text:
            return
        if self._kind is None:
            self._arguments.append(text)
            self._events.append(ToolCallArguments(self._num_calls - 1, text))
            return
        self._events.append(self._kind(text, self._parting))
        self._parting = ""
        self._told.add(self._kind)

    def _end(self, is_cut: bool = False) -> None:
        """End the message, if there is one: a function without parameters may be called with nothing at all."""
        if self._header is not None or self._kind is not None:
            return
        if not is_cut and not "".join(self._arguments).strip():
            self._tell("{}")
        arguments, index = "".join(self._arguments), self._num_calls - 1
        is_whole = object_of(arguments) is not None
        self._events.append(ToolCallFinished(index) if is_whole else MalformedToolCall(index, arguments))

    def _taken(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events


def _may_begin(text: str) -> bool:
    return any(text.startswith(head) or head.startswith(text) for head in _HEADS)
