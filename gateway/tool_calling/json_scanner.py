"""The end of a JSON object in a text that arrives in pieces."""

_OUTSIDE_OF_STRINGS = frozenset('{}[]:,"+-.0123456789eE \t\r\n' + "truefalsenull")


class ObjectScanner:
    """Counts brackets outside of strings; whether what they enclose is JSON, a JSON parser has to say.

    Pure.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False
        self.is_done = False
        self.is_broken = False

    def read(self, text: str) -> int:
        """Return how many characters of `text` belong to the object: all, unless it ends or is no JSON."""
        for at, character in enumerate(text):
            if self._in_string:
                self._read_string(character)
                continue
            if character not in _OUTSIDE_OF_STRINGS:
                self.is_broken = True
                return at
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            if self._depth == 0:
                self.is_done = True
                return at + 1
        return len(text)

    def _read_string(self, character: str) -> None:
        self._in_string = self._is_escaped or character != '"'
        self._is_escaped = character == "\\" and not self._is_escaped
