"""A grammar in Lark as one of its texts within a string of JSON.

The input of a custom tool is such a string in the calls that models write. Each character has one spelling here, so
that a text fits the grammar exactly if its spelling fits this one.
"""

import json
import re
from dataclasses import dataclass

from gateway.grammar.json_quoted_regex import quoted_regex, quoted_text

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*)
    |(?P<range>"(?:[^"\\\n]|\\.)*"\s*\.\.\s*"(?:[^"\\\n]|\\.)*")
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*)
    |(?P<directive>%[a-z]+)
    |(?P<refused><[^<>\s]*>|@\w+|[&~])
    |(?P<word>[A-Za-z_]\w*)
    |(?P<other>->|.)""",
    re.VERBOSE,
)
_IMPORT = re.compile(r"%import\s+common\s*\.\s*(\w+)(?:\s*->\s*(\w+))?")
_COMMON = {
    "CR": r"/\r/",
    "LF": r"/\n/",
    "NEWLINE": r"/\r?\n/+",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
    "ESCAPED_STRING": r'/"([^"\\]|\\.)*"/',
}
"""Those of Lark's common terminals that hold characters which JSON escapes."""


@dataclass(frozen=True)
class _Statement:
    """A rule, a terminal, or a directive, whose `name` is empty.

    `is_split`: a terminal that has to become a rule.
    """

    name: str
    body: str
    is_split: bool


def json_quoted(grammar: str) -> str:
    """Return the grammar of the texts of `grammar` as they stand between the quotes of a JSON string.

    Raises ValueError for what can't be written so.
    """
    grammar = _IMPORT.sub(_imported, grammar)
    statements = [_statement(text) for text in _statements(grammar)]
    split = {one.name for one in statements if one.is_split and one.name.isupper()}
    while more := {one.name for one in statements if one.name.isupper() and _names(one.body) & split} - split:
        split |= more  # a terminal of terminals that are rules now is a rule, too
    return "\n".join(_renamed(one.body, split) for one in statements)


def _imported(found: re.Match[str]) -> str:
    name, alias = found[1], found[2] or found[1]
    return f"{alias}: {_COMMON[name]}" if name in _COMMON else found[0]


def _statements(grammar: str) -> list[str]:
    """Return the text of each statement: one begins a line with a name and a colon, or with a directive."""
    begins = [match.start() for match in re.finditer(r"^[ \t]*(?:[?!]?[A-Za-z_]\w*(?:\.\d+)?\s*:|%)", grammar, re.M)]
    return [grammar[begin:end] for begin, end in zip([0, *begins], [*begins, len(grammar)], strict=True)]


def _statement(text: str) -> _Statement:
    name = re.match(r"\s*[?!]?([A-Za-z_]\w*)", text)
    is_ignore, is_split, parts = text.lstrip().startswith("%ignore"), False, []
    for token in _TOKEN.finditer(text):
        kind, found = token.lastgroup, token[0]
        if kind == "refused" or (kind == "directive" and found not in ("%import", "%ignore")):
            raise ValueError(f"{found} can't stand in it")
        quoted = None
        if kind == "regex":
            pattern, _, flags = found[1:].rpartition("/")
            quoted = quoted_regex(pattern.replace("\\/", "/"), flags)
        elif kind == "range":
            quoted = quoted_regex(_class_of(found), "")
        elif kind == "string":
            found = _quoted_string(found)
        is_split |= quoted is not None
        parts.append(found if quoted is None else f"({quoted})")
    body = "".join(parts)
    if is_ignore and is_split:
        return _Statement("", _ignored(body), False)
    return _Statement(name[1] if name else "", body, is_split)


def _ignored(body: str) -> str:
    """Return a directive that ignores each of the spellings as a terminal of its own."""
    regexes = re.findall(r"/(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/", body)
    return "\n".join(f"%ignore {regex}" for regex in regexes) + "\n"


def _class_of(text: str) -> str:
    """Return the class of characters that a range, `"a".."z"`, is."""
    first, last = (json.loads(end.strip()) for end in re.split(r'(?<=")\s*\.\.\s*(?=")', text))
    return f"[{re.escape(first)}-{re.escape(last)}]"


def _quoted_string(literal: str) -> str:
    text, flag = (literal[:-1], "i") if literal.endswith("i") else (literal, "")
    return json.dumps(quoted_text(json.loads(text)), ensure_ascii=False) + flag


def _names(body: str) -> set[str]:
    return {token[0] for token in _TOKEN.finditer(body) if token.lastgroup == "word"}


def _renamed(body: str, split: set[str]) -> str:
    """Return a statement in which terminals that are rules now have names of rules."""
    return "".join(
        f"json_{token[0].lower()}" if token.lastgroup == "word" and token[0] in split else token[0]
        for token in _TOKEN.finditer(body)
    )
