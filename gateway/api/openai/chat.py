"""Chat's bodies, whole and in chunks."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contracts.errors import TandemError
from contracts.events import FinishReason
from gateway.api.response_formatter import LogprobEntries, Spelling, StreamedFormatter, ending_of, joined
from gateway.generation.generation_state import OutputDelta, ShownToken
from gateway.generation.output_parser import OutputParser, OutputParserSpec
from gateway.generation.usage import Usage
from gateway.prompting.chat_template import Prompting
from gateway.tool_calling.custom_tools import input_of
from gateway.tool_calling.events import (
    ContentDelta,
    MalformedToolCall,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)


@dataclass(frozen=True)
class ChatFormatter(StreamedFormatter):
    """The bodies of a chat whose answers are text alone.

    `id` is the response's; `created` seconds since the epoch; `spelling`: of tokens in log-probabilities;
    `fingerprint`: of the system that answers, told where an answer ends, as with vLLM.
    """

    id: str
    model: str
    created: int
    prompting: Prompting
    has_logprobs: bool
    spelling: Spelling
    fingerprint: str = ""

    def opening(self, index: int, usage: Usage) -> list[dict[str, Any]]:
        return [self.delta(index, {"role": "assistant", "content": ""}, (), None)]

    def chunk(self, piece: OutputDelta) -> list[dict[str, Any]]:
        delta = {"content": piece.text} if piece.text or piece.finish is None else {}
        return [self.delta(piece.index, delta, piece.shown, piece.finish, piece.stop_reason)]

    def choice(self, pieces: Sequence[OutputDelta]) -> dict[str, Any]:
        whole = joined(pieces)
        message = {"role": "assistant", "content": whole.text, "refusal": None}
        return self.message(whole.index, message, whole.shown, whole.finish, whole.stop_reason)

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self._last("chat.completion") | {"choices": choices, "usage": usage.body()}

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        return [self._last("chat.completion.chunk") | {"choices": [], "usage": usage.body()}] if include_usage else []

    def delta(
        self,
        index: int,
        delta: dict[str, Any],
        shown: Sequence[ShownToken],
        finish: str | None,
        stop_reason: str | int | None = None,
    ) -> dict[str, Any]:
        """A chunk that adds `delta` to the message."""
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(shown), **ending_of(finish, stop_reason)}
        head = self._head if finish is None else self._last
        return head("chat.completion.chunk") | {"choices": [choice]}

    def message(
        self,
        index: int,
        message: dict[str, Any],
        shown: Sequence[ShownToken],
        finish: str | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        """A choice whose message is `message`."""
        return {"index": index, "message": message, "logprobs": self._logprobs(shown), **ending_of(finish, stop_reason)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _last(self, kind: str) -> dict[str, Any]:
        return self._head(kind) | {"system_fingerprint": self.fingerprint}

    def _logprobs(self, shown: Sequence[ShownToken]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        entries = LogprobEntries(self.prompting, self.spelling)
        return {"content": [entries.content(item) for item in shown], "refusal": None}


@dataclass
class ParsedChatFormatter:
    """A ChatFormatter that tells thoughts and calls from text.

    Owned by the one who writes it, who feeds each choice in order. `tells_thoughts`: whether the client wants them.
    The input of a custom tool is told at once, when all of the JSON that holds it has come: by then it is in `_inputs`,
    by choice and call.
    """

    chat: ChatFormatter
    reading: OutputParserSpec
    tells_thoughts: bool = True
    _read: dict[int, OutputParser] = field(init=False)
    _inputs: dict[tuple[int, int], str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._read = defaultdict(self.reading.begin)

    @property
    def id(self) -> str:
        return self.chat.id

    @property
    def ending(self) -> bytes:
        return self.chat.ending

    @property
    def reasoning_tokens(self) -> int | None:
        return None if self.reading.thinking is None else sum(read.num_thought for read in self._read.values())

    def opening(self, index: int, usage: Usage) -> list[dict[str, Any]]:
        """`content` is null: whether there will be any is not known."""
        return [self.chat.delta(index, {"role": "assistant", "content": None}, (), None)]

    def chunk(self, piece: OutputDelta) -> list[dict[str, Any]]:
        """Empty while all of it is held back, or thought and nobody wants to know."""
        read = self._read[piece.index]
        delta = self._delta(piece.index, read.feed(piece))
        if not delta and not piece.shown and piece.finish is None:
            return []
        return [self.chat.delta(piece.index, delta, piece.shown, _finish(piece, read), piece.stop_reason)]

    def choice(self, pieces: Sequence[OutputDelta]) -> dict[str, Any]:
        whole = joined(pieces)
        read = self._read[whole.index]
        events = [event for piece in pieces for event in read.feed(piece)]
        calls, thought = self._calls(events), _thought(events)
        content = _said(events) or (None if calls or thought else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reading.thinking is not None and self.tells_thoughts:
            message |= _reasoning(thought or None)
        if calls:
            message["tool_calls"] = calls
        return self.chat.message(whole.index, message, whole.shown, _finish(whole, read), whole.stop_reason)

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return self.chat.whole(choices, usage)

    def closing(self, usage: Usage, include_usage: bool) -> list[dict[str, Any]]:
        return self.chat.closing(usage, include_usage)

    def failure(self, error: TandemError) -> dict[str, Any]:
        return self.chat.failure(error)

    def refusal(self, error: TandemError) -> dict[str, Any]:
        return self.chat.refusal(error)

    def encode(self, body: dict[str, Any]) -> bytes:
        return self.chat.encode(body)

    def _delta(self, choice: int, events: list[OutputEvent]) -> dict[str, Any]:
        """At most one entry a call: not every client adds up several of one chunk."""
        inputs = self._inputs
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            match event:
                case ToolCallStarted():
                    calls[event.index] = {"index": event.index, **self._call(event.name)}
                    if event.name in self.reading.custom_names:
                        inputs[choice, event.index] = ""
                case ToolCallArguments() if (choice, event.index) in inputs:
                    inputs[choice, event.index] += event.text
                case ToolCallFinished() if (choice, event.index) in inputs:
                    more = calls.setdefault(event.index, {"index": event.index, "custom": {}})
                    more["custom"]["input"] = input_of(inputs.pop((choice, event.index)))
                case ToolCallArguments():
                    more = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
                    more["function"]["arguments"] += event.text
        wanted = [call for index, call in calls.items() if self.reading.is_wanted(index)]
        told = [
            event
            for event in events
            if not isinstance(event, MalformedToolCall) or not self.reading.is_wanted(event.index)
        ]
        content = _said(told)  # of a broken call that was told of, that is all
        thought = _thought(events) if self.tells_thoughts else ""
        delta = (_reasoning(thought) if thought else {}) | ({"content": content} if content else {})
        return delta | ({"tool_calls": wanted} if wanted else {})

    def _calls(self, events: list[OutputEvent]) -> list[dict[str, Any]]:
        """The complete ones."""
        names: dict[int, str] = {}
        arguments: defaultdict[int, list[str]] = defaultdict(list)
        closed: list[dict[str, Any]] = []
        for event in events:
            match event:
                case ToolCallStarted():
                    names[event.index] = event.name
                case ToolCallArguments():
                    arguments[event.index].append(event.text)
                case ToolCallFinished() if self.reading.is_wanted(event.index):
                    closed.append(self._call(names[event.index], "".join(arguments[event.index])))
        return closed

    def _call(self, name: str, arguments: str = "") -> dict[str, Any]:
        assert self.reading.form is not None, "nothing is read as a call without a form"
        if name in self.reading.custom_names:
            custom = {"name": name, "input": input_of(arguments) if arguments else ""}
            return {"id": self.reading.form.new_id(), "type": "custom", "custom": custom}
        function = {"name": name, "arguments": arguments}
        return {"id": self.reading.form.new_id(), "type": "function", "function": function}


def _reasoning(text: str | None) -> dict[str, str | None]:
    """Return it by vLLM's name, and by the one that it had before, which many clients read."""
    return {"reasoning": text, "reasoning_content": text}


def _thought(events: Sequence[OutputEvent]) -> str:
    return "".join(event.parted for event in events if isinstance(event, ReasoningDelta))


def _said(events: Sequence[OutputEvent]) -> str:
    """What is no call is said."""
    told = [event for event in events if isinstance(event, ContentDelta | MalformedToolCall)]
    return "".join(event.parted if isinstance(event, ContentDelta) else event.text for event in told)


def _finish(piece: OutputDelta, read: OutputParser) -> str | None:
    return "tool_calls" if read.has_called and piece.finish == FinishReason.STOP else piece.finish
