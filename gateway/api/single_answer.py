"""What formatters share that tell one answer as a row of items, and not as choices."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from contracts.events import FinishReason
from gateway.generation.generation_state import OutputDelta
from gateway.generation.output_parser import OutputParserSpec
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


class SingleAnswer(ABC):
    """The reading of one answer, whose thoughts, words and calls a formatter makes bodies of.

    `reading`: how the answer is read; None if all of it is said.
    """

    def __init__(self, reading: OutputParserSpec | None) -> None:
        self._reading = reading
        self._read = None if reading is None else reading.begin()
        self._last: OutputDelta | None = None

    @property
    def reasoning_tokens(self) -> int | None:
        if self._read is None or self._reading is None or self._reading.thinking is None:
            return None
        return self._read.num_thought

    @property
    def has_called(self) -> bool:
        return self._read is not None and self._read.has_called

    @property
    def finish(self) -> str:
        """Return why the answer ended, as far as that is known."""
        return FinishReason.STOP if self._last is None else self._last.finish or FinishReason.STOP

    def chunk(self, piece: OutputDelta) -> list[Body]:
        return [body for event in self._events(piece) for body in self._told(event)]

    def choice(self, pieces: Sequence[OutputDelta]) -> Body:
        """Read all of an answer: a call that broke, or was cut off, is text in it."""
        events = [event for piece in pieces for event in self._events(piece)]
        for event in said_if_broken(events):
            self._told(event)
        return {}

    def _events(self, piece: OutputDelta) -> list[OutputEvent]:
        self._last = piece
        return [ContentDelta(piece.text)] if self._read is None else self._read.feed(piece)

    def _told(self, event: OutputEvent) -> list[Body]:
        if isinstance(event, ReasoningDelta | ContentDelta):
            return self._more(event) if event.text else []
        if self._reading is None or not self._reading.is_wanted(event.index):
            return self._more(ContentDelta(event.text)) if isinstance(event, MalformedToolCall) else []
        match event:
            case ToolCallStarted():
                assert self._reading.form is not None, "nothing is read as a call without a form"
                return self._begin_call(event.name, self._reading.form.new_id())
            case ToolCallArguments():
                return self._more_arguments(event.text)
            case ToolCallFinished():
                return self._end_call(is_whole=True)
            case MalformedToolCall():  # in a stream: what came of it was told, and is none
                return self._end_call(is_whole=False)

    @abstractmethod
    def _more(self, event: ReasoningDelta | ContentDelta) -> list[Body]:
        """Tell more words, of which there are some."""

    @abstractmethod
    def _begin_call(self, name: str, call_id: str) -> list[Body]: ...

    @abstractmethod
    def _more_arguments(self, text: str) -> list[Body]: ...

    @abstractmethod
    def _end_call(self, is_whole: bool) -> list[Body]: ...
