"""Text that a command gets on its command line or on standard input."""

import sys
from collections.abc import Sequence

from contracts.errors import RequestError


def piped() -> str:
    """Return all of standard input; empty if that is closed. Raises RequestError if it is not text."""
    try:
        return _require_text(sys.stdin.read() if sys.stdin else "", "standard input")
    except UnicodeDecodeError as error:
        raise RequestError("standard input is not text in UTF-8") from error


def typed(words: Sequence[str]) -> str:
    """Return the words as one text. Raises RequestError if they are not text."""
    return _require_text(" ".join(words), "the command line")


def _require_text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that Python hid in surrogates
        raise RequestError(f"{where} is not text in UTF-8") from error
    return text
