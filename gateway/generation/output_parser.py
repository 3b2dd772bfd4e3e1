"""How the answers to one request are read: what of them is thought, what is said, what is called."""

from dataclasses import dataclass

from contracts.events import FinishReason
from gateway.generation.generation_state import OutputDelta
from gateway.prompting.chat_template import Prompting
from gateway.reasoning.reasoning_format import ReasoningFormat, ReasoningParser
from gateway.tool_calling.events import OutputEvent, ReasoningDelta, ToolCallFinished
from gateway.tool_calling.tool_choice import Calling, CustomFunction
from gateway.tool_calling.tool_format import ToolFormat


@dataclass(frozen=True)
class OutputParserSpec:
    """The way in which the answers to one request are read.

    `begun`: what the prompt has begun of the answers, as `thinking` knows it. `names`: of the functions that may be
    called, not their schemas, which may be large; `custom_names`: of those that take text. `form`: None if there are
    no tools to call; `thinking`: None if the model is not known to think aloud.
    """

    thinking: ReasoningFormat | None = None
    begun: str = ""
    names: frozenset[str] = frozenset()
    custom_names: frozenset[str] = frozenset()
    in_parallel: bool = True
    form: ToolFormat | None = None

    def begin(self) -> "OutputParser":
        """One answer."""
        calls = None
        if self.names and self.form is not None:
            calls = self.form.parser(set(self.names))
        if self.thinking is not None:
            return OutputParser(self.thinking.reader(self.begun, calls), self)
        assert calls is not None, "an answer that may be anything is not read"
        return OutputParser(calls, self)

    def is_wanted(self, index: int) -> bool:
        """Return whether the client wants this call: it may have asked for one alone."""
        return bool(self.names) and (self.in_parallel or index == 0)


def parser_spec(prompting: Prompting, begun: str, calling: Calling | None) -> OutputParserSpec | None:
    """None: there is nothing to tell apart."""
    if prompting.thinking is None and calling is None:
        return None
    functions = [] if calling is None else list(calling.functions.values())
    names = frozenset(function.name for function in functions)
    custom = frozenset(function.name for function in functions if isinstance(function, CustomFunction))
    in_parallel = calling is None or calling.in_parallel
    return OutputParserSpec(prompting.thinking, begun, names, custom, in_parallel, prompting.tool_form)


class OutputParser:
    """One answer so far, fed in order."""

    def __init__(self, reader: ReasoningParser, reading: OutputParserSpec) -> None:
        self._reader = reader
        self._reading = reading
        self._num_tokens = 0
        self.num_thought = 0
        self.has_called = False

    def feed(self, piece: OutputDelta) -> list[OutputEvent]:
        was_thinking = self._reader.is_thinking
        events = self._events(piece)
        is_thinking = was_thinking and self._reader.is_thinking
        if is_thinking or any(isinstance(event, ReasoningDelta) for event in events):
            self.num_thought += piece.num_tokens - self._num_tokens
        self._num_tokens = piece.num_tokens
        self.has_called |= any(
            isinstance(event, ToolCallFinished) and self._reading.is_wanted(event.index) for event in events
        )
        return events

    def _events(self, piece: OutputDelta) -> list[OutputEvent]:
        events, end = [], 0
        for mark in piece.marks:
            events += self._reader.feed(piece.text[end : mark.start]) + self._reader.mark(piece.text[mark])
            end = mark.stop
        events += self._reader.feed(piece.text[end:])
        return events if piece.finish is None else events + self._reader.finish(piece.finish == FinishReason.LENGTH)
