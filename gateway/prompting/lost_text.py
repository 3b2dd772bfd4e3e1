"""The texts that a client sent, looked for in the prompt: a chat template may pass a message over."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

MAX_COUNTED_CHARS = 1 << 24
"""Characters looked through to count a text that others have in them; past that it is enough that it is there."""

_SWITCHES = re.compile(r"/(?:no_?)?think\b|/system_override")
"""Words by which some templates are told something, and which they take out."""
_NO_WORD = re.compile(r"[\W_]+")


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
    if _are_in_order(texts, prompt):
        return None
    blob = "\0".join(sent.text for sent in texts if not sent.is_loose)
    counts = len(blob) * len(texts) <= MAX_COUNTED_CHARS
    squeezed = ""
    for sent in texts:
        wanted = blob.count(sent.text) if counts and not sent.is_loose else 1
        found = max(prompt.count(form) for form in _forms(sent.text))
        if found >= wanted:
            continue
        squeezed = squeezed or _NO_WORD.sub("", prompt)
        if found or not _is_within(sent.text, squeezed):
            return sent
    return None


def _texts_of(index: int, message: dict[str, Any], after: str) -> Iterator[SentText]:
    at, text = f"messages[{index}]", message["content"]
    if after and message["role"] == "assistant":
        text = text.rpartition(after)[2]
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


def _are_in_order(texts: Sequence[SentText], prompt: str) -> bool:
    """Return whether the texts follow each other in the prompt: nearly always so, and then one pass tells."""
    at = 0
    for sent in texts:
        if sent.is_loose:
            if not any(form in prompt for form in _forms(sent.text)):
                return False
            continue
        begin = prompt.find(sent.text, at)
        at = begin + len(sent.text) if begin >= 0 else _end_of_other_form(sent.text, prompt, at)
        if at < 0:
            return False
    return True


def _end_of_other_form(text: str, prompt: str, at: int) -> int:
    """Return where the text ends in another form; -1 if it is not there."""
    for form in _forms(text):
        if (begin := prompt.find(form, at)) >= 0:
            return begin + len(form)
    return -1


def _forms(text: str) -> Iterator[str]:
    """Yield the ways in which a template may write a text, the likeliest first."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]


def _is_within(text: str, squeezed: str) -> bool:
    """Return whether the letters and digits of `text` are in a prompt of which nothing else is left."""
    pieces = [piece for part in _SWITCHES.split(text) if (piece := part.strip())]
    return all(
        _NO_WORD.sub("", piece) in squeezed or _NO_WORD.sub("", json.dumps(piece)) in squeezed for piece in pieces
    )
