"""The beginning of a call, `{"name": "f", "arguments": {`: what follows can be passed on as it comes."""

import json
import re

MAX_CHARS = 512

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_PARTS = (("{",), ('"name"',), (":",), (), (",",), ('"arguments"', '"parameters"'), (":",), ("{",))
"""Each is one of some words; the one without words is any string."""


def read_head(text: str) -> tuple[str, int] | None:
    """The name, and how many characters come before the arguments. None: that can't be said yet.

    Raises ValueError if `text` begins otherwise, or at more than MAX_CHARS.
    """
    text, is_cut = text[:MAX_CHARS], len(text) >= MAX_CHARS
    name, at = "", 0
    for wanted in _PARTS:
        at = _end_of_space(text, at)
        end = _end_of_one(wanted, text, at) if wanted else _end_of_string(text, at)
        if end is None and is_cut:
            raise ValueError("too long")
        if end is None:
            return None
        if not wanted:
            name = json.loads(text[at:end])
        at = end
    return name, at - 1


def _end_of_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _end_of_string(text: str, at: int) -> int | None:
    if (match := _STRING.match(text, at)) is not None:
        return match.end()
    if text[at : at + 1] in ("", '"'):
        return None
    raise ValueError("no string")


def _end_of_one(wanted: tuple[str, ...], text: str, at: int) -> int | None:
    for word in wanted:
        if text.startswith(word, at):
            return at + len(word)
    if any(word.startswith(text[at:]) for word in wanted):
        return None
    raise ValueError(f"none of {wanted}")
