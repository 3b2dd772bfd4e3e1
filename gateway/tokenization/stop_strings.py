"""Stop strings in a text that arrives in pieces: what may be shown, and where it ends.

generation.generation_state ends the answer by it.
"""

from collections.abc import Sequence


class StopFinder:
    """Holds back what may become a stop string.

    The stop that is complete first wins, the longest of those. Pure.

    The outcome does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str, may_end: bool = True) -> str:
        """The text that may be shown now.

        After a hit (`hit` is the stop string) there is no more. Unless it `may_end`, no stop is complete in this text,
        though one may begin there.
        """
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        num_held, text = len(self._held), self._held + text
        if may_end and (found := self._first(text, num_held)) is not None:
            end, stop = found
            self.hit, self._held = stop, ""
            return text[: end if self._include else end - len(stop)]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        text, self._held = self._held, ""
        return text

    def _first(self, text: str, num_held: int) -> tuple[int, str] | None:
        """Return end and text of the first stop string that ends behind what was held back."""
        starts = [(text.find(stop, max(0, num_held + 1 - len(stop))), stop) for stop in self._stops]
        ends = [(at + len(stop), -len(stop), stop) for at, stop in starts if at >= 0]
        return (min(ends)[0], min(ends)[2]) if ends else None

    def _num_held(self, text: str) -> int:
        return max(overlap(text, stop) for stop in self._stops)


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
