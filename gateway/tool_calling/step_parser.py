"""The turn of a reader that goes by steps: text in, steps while there is something to do, events out."""

from collections.abc import Callable

from gateway.tool_calling.events import OutputEvent


class StepParser:
    """A reader that goes by steps.

    `_step` takes from `_text` what it can, adds to `_events`, and returns whether the next one, which it may have
    set, has something to do.
    """

    def __init__(self, first: Callable[[], bool]) -> None:
        self._text = ""
        self._events: list[OutputEvent] = []
        self._step = first

    def feed(self, text: str) -> list[OutputEvent]:
        """What is certain now."""
        self._text += text
        while self._step():
            pass
        return self._taken()

    def mark(self, marker: str) -> list[OutputEvent]:
        return self.feed(marker)

    def _taken(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events
