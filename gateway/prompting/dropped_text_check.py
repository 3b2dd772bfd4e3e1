"""The texts that a client sent, looked for in the prompt: a chat template may pass a message over."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

MAX_SEARCHED_CHARS = 1 << 25
"""Characters of one text that are looked through for a request, about 20 ms of the event loop; what is left then counts
as shown."""

_SWITCHES = re.compile(r"/(?:no_?)?think\b|/system_override")
"""Words by which some templates are told something, and which they take out."""
_NO_WORD = re.compile(r"[\W_]+")
_THOUGHT_END = re.compile(r"</\w*(?:think|thought|reason|reflect)\w*>")
"""The end of a thought in a turn of the assistant: many templates show only what comes after it."""


class _SearchedEnough(Exception):
    """MAX_SEARCHED_CHARS were looked through."""


class _SearchedText:
    """A text, and how many of its characters may still be looked through, however often."""

    def __init__(self, text: str) -> None:
        self.text, self._budget = text, MAX_SEARCHED_CHARS

    def find(self, form: str, start: int = 0) -> int:
        found = self.text.find(form, start)
        self._spend((found if found >= 0 else len(self.text)) - start)
        return found

    def count(self, form: str) -> int:
        self._spend(len(self.text))
        return self.text.count(form)

    def _spend(self, num_chars: int) -> None:
        self._budget -= num_chars
        if self._budget < 0:
            raise _SearchedEnough


class SentText(NamedTuple):
    """A text, and the field of the request that it came in.

    `is_loose`: it is enough that it stands anywhere.
    """

    param: str
    text: str
    is_loose: bool = False


def sent_texts(messages: Sequence[dict[str, Any]], after: str = "") -> list[SentText]:
    """Return what the prompt has to show of the messages, in order.

    `after`: a mark in a text of the assistant; what is before it, its reasoning, is the template's to show or drop.
    """
    return [text for index, message in enumerate(messages) for text in _texts_of(index, message, after)]


def first_lost(texts: Sequence[SentText], prompt: str) -> SentText | None:
    """Return the first text that `prompt` does not show; None if it shows all.

    Templates trim texts, and write results of tools as JSON: such a text is shown.
    """
    searched = _SearchedText(prompt)
    try:
        return None if _are_in_order(texts, searched) else _first_uncounted(texts, searched)
    except _SearchedEnough:
        return None


def _first_uncounted(texts: Sequence[SentText], prompt: _SearchedText) -> SentText | None:
    """Return the first text that stands in the prompt less often than in the texts, whatever their order."""
    blob = _SearchedText("\0".join(_SWITCHES.sub("", sent.text) for sent in texts if not sent.is_loose))
    squeezed = None
    for sent in texts:
        wanted = 1 if sent.is_loose else max(1, blob.count(sent.text))
        found = sum(prompt.count(form) for form in _forms(sent.text))
        if found >= wanted:
            continue
        squeezed = squeezed or _SearchedText(_NO_WORD.sub("", prompt.text))
        if found or not _is_within(sent.text, squeezed):
            return sent
    return None


def _texts_of(index: int, message: dict[str, Any], after: str) -> Iterator[SentText]:
    at, text = f"messages[{index}]", message["content"]
    if message["role"] == "assistant":
        text = _THOUGHT_END.split(text.rpartition(after)[2] if after else text)[-1]
    if text := text.strip():
        yield SentText(at, text)
    for number, call in enumerate(message.get("tool_calls", ())):
        where, function = f"{at}.tool_calls[{number}]", call["function"]
        yield SentText(where, function["name"])
        for leaf in _leaves(function["arguments"]):
            yield SentText(where, leaf, is_loose=True)


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value, without the names of its fields, that are not blank."""
    if isinstance(value, str):
        if value.strip():
            yield value.strip()
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)


def _are_in_order(texts: Sequence[SentText], prompt: _SearchedText) -> bool:
    """Return whether the texts follow each other in the prompt: nearly always so, and then one pass tells."""
    at = loose_at = 0
    for sent in texts:
        if sent.is_loose:
            loose_at = max(loose_at, at)
            end = _end_of(sent.text, prompt, loose_at)
            if end < 0 and (end := _end_of(sent.text, prompt, 0)) < 0:
                return False
            loose_at = end
        elif (at := _end_of(sent.text, prompt, at)) < 0:
            return False
    return True


def _end_of(text: str, prompt: _SearchedText, start: int) -> int:
    """Return where the text ends in the first of its forms that stands behind `start`; -1 if none does."""
    for form in _forms(text):
        if (begin := prompt.find(form, start)) >= 0:
            return begin + len(form)
    return -1


def _forms(text: str) -> Iterator[str]:
    """Yield the different ways in which a template may write a text, the likeliest first."""
    yield text
    if (quoted := json.dumps(text, ensure_ascii=False)[1:-1]) != text:
        yield quoted
    if (escaped := json.dumps(text)[1:-1]) != quoted:
        yield escaped


def _is_within(text: str, squeezed: _SearchedText) -> bool:
    """Return whether the letters and digits of `text` are in a prompt of which nothing else is left."""
    pieces = [piece for part in _SWITCHES.split(text) if (piece := part.strip())]
    forms = ((_NO_WORD.sub("", piece), _NO_WORD.sub("", json.dumps(piece))) for piece in pieces)
    return all(any(squeezed.find(form) >= 0 for form in ways) for ways in forms)
