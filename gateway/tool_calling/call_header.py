"""The beginning of a call, `{"name": "f", "arguments": {`: what follows can be passed on as it comes.

Before the name there may be `"type": "function"`, which Llama 3 and 4 often write (vllm-project/vllm#46863).
"""

import json
import re
from collections import deque

MAX_CHARS = 512

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NAME, _TYPE = '"name"', '"type"'
_PARTS = (("{",), (_NAME, _TYPE), (":",), (), (",",), ('"arguments"', '"parameters"'), (":",), ("{",))
"""Each is one of some words; the one without words is any string."""
_TYPED = ((":",), ('"function"',), (",",), (_NAME,))
"""What stands between a type and what is behind a name."""


def read_head(text: str) -> tuple[str, int] | None:
    """The name, and how many characters come before the arguments. None: that can't be said yet.

    Raises ValueError if `text` begins otherwise, or at more than MAX_CHARS.
    """
    text, is_cut = text[:MAX_CHARS], len(text) >= MAX_CHARS
    name, at, parts = "", 0, deque(_PARTS)
    while parts:
        wanted, at = parts.popleft(), _end_of_space(text, at)
        end = _end_of_one(wanted, text, at) if wanted else _end_of_string(text, at)
        if end is None and is_cut:
            raise ValueError("too long")
        if end is None:
            return None
        if not wanted:
            name = json.loads(text[at:end])
        elif text[at:end] == _TYPE:
            parts.extendleft(reversed(_TYPED))
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
