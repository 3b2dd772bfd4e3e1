"""The arguments of a call that a client sends back, whole or as far as the answer came."""

import json
import re
from typing import Any

from gateway.tool_calling.call_parser import object_of

UNREADABLE = "raw"
"""The name under which a chat template sees arguments that are no JSON object: all know objects alone."""

# A pair of surrogates is one escape: half of a pair is no text.
_ESCAPE = (
    r"\\(?:[^u]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_STRING = rf'"(?:[^"\\]|{_ESCAPE})*'
_TOKEN = re.compile(rf'(?P<string>{_STRING})(?P<end>")?|(?P<bracket>[\[\]{{}}])|[^"\[\]{{}}]+', re.DOTALL)
_WORD = re.compile(r"[\w.+-]*\Z")
_WORDS = ("true", "false", "null")
_CLOSING = {"{": "}", "[": "]"}


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments that `text` is the JSON of; no text is no arguments.

    An answer that `max_tokens` cut may end within a call, and a model may write what is no JSON. A client that keeps
    the conversation sends either back: what came is shown, closed where it was cut.
    """
    whole = object_of(text or "{}")
    given = _closed(text) if whole is None else whole
    return given if given is not None and is_text(given) else {UNREADABLE: text}


def is_text(value: Any) -> bool:
    """Return whether `value` is free of half surrogate pairs, which JSON can spell and no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _closed(text: str) -> dict[str, Any] | None:
    """Return the object that `text` begins; None if it begins none."""
    begun, brackets = _scanned(text)
    closing = "".join(_CLOSING[bracket] for bracket in reversed(brackets))
    for ending in ("", ": null"):  # a name may be the last that came
        if (value := object_of(begun + ending + closing)) is not None:
            return value
    return None


def _scanned(text: str) -> tuple[str, list[str]]:
    """Return what of `text` can stand before closing brackets, and the brackets that are open there."""
    brackets: list[str] = []
    for token in _TOKEN.finditer(text):
        if token["string"] == '"' and token["end"] is None:
            return _whole_word(text[: token.start()].rstrip()), brackets
        if token["string"] is not None and token["end"] is None:
            return text[: token.end()] + '"', brackets
        if token["bracket"] in _CLOSING:
            brackets.append(token["bracket"])
        elif token["bracket"] and brackets:
            brackets.pop()
    return _whole_word(text.rstrip()), brackets


def _whole_word(text: str) -> str:
    """Return `text` with its last word or number completed, without a comma behind which nothing came."""
    begun = _WORD.search(text)
    assert begun is not None, "it matches nothing, too"
    word = next((word for word in _WORDS if begun[0] and word.startswith(begun[0])), begun[0].rstrip("+-.eE"))
    text = (text[: begun.start()] + word).rstrip()
    return text + "null" if text.endswith(":") else text.removesuffix(",")
