"""What an answer turns out to be while it comes: things thought, things said, and calls."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ParserEvent:
    """A piece of what is thought or said.

    `parting`: what stands between it and what of its kind was told before where both are shown as one; empty if it
    goes on.
    """

    text: str
    parting: str = ""

    @property
    def parted(self) -> str:
        return self.parting + self.text


class ReasoningDelta(ParserEvent):
    """Reasoning, which is no part of the answer."""


class ContentDelta(ParserEvent):
    """The answer."""


@dataclass(frozen=True)
class ToolCallStarted:
    """A call begins. `index` counts the calls of one answer."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of a call's arguments, as the model writes them."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallFinished:
    """The call is complete and its arguments are a JSON object."""

    index: int


@dataclass(frozen=True)
class MalformedToolCall:
    """What began as this call is none, or was cut off: `text` is all of it, marker included."""

    index: int
    text: str


OutputEvent = ReasoningDelta | ContentDelta | ToolCallStarted | ToolCallArguments | ToolCallFinished | MalformedToolCall


def said_if_broken(events: Sequence[OutputEvent]) -> Iterator[OutputEvent]:
    """Yield the events of a whole answer, in which a call that broke or was cut off is text."""
    broken = {event.index for event in events if isinstance(event, MalformedToolCall)}
    for event in events:
        if isinstance(event, MalformedToolCall):
            yield ContentDelta(event.text)
        elif not (isinstance(event, ToolCallStarted | ToolCallArguments) and event.index in broken):
            yield event
