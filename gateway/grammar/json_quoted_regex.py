"""Regular expressions as rules of Lark for their texts within a string of JSON.

JSON spells a quotation mark, a backslash and control characters in two characters or six, which all begin alike. To
llguidance's lexer, which never backs up, they have to be lexemes of their own: so a class that holds some of them
becomes an alternative of the other characters and of each spelling. What holds none of them stays as it is.
"""

import json
import re
from dataclasses import dataclass
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer

from gateway.grammar.exact_schema import end_of_class

_SPELLED = ['"', "\\", *map(chr, range(32))]
"""The characters that JSON escapes."""
_PLAIN = r'[^"\\\x00-\x1f]'
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|:))?")
_TIMES = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")


@dataclass(frozen=True)
class Piece:
    """A part of a regular expression: one that JSON leaves as it is, or an expression of Lark instead."""

    regex: str = ""
    lark: str = ""


def quoted_text(text: str) -> str:
    """Return `text` as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted_regex(pattern: str, flags: str) -> str | None:
    """Return an expression of Lark for the spellings of what `pattern` matches.

    None if it may stay as it is. Raises ValueError for what can't be written so.
    """
    if set(flags) - set("is"):
        raise ValueError(f"a regular expression with the flags '{flags}' can't stand in it")
    return _PatternQuoter(pattern, flags).whole()


class _PatternQuoter:
    def __init__(self, pattern: str, flags: str) -> None:
        self._pattern, self._at = pattern, 0
        self._suffix, self._any = ("i" if "i" in flags else ""), r"[\s\S]" if "s" in flags else r"[^\n]"

    def whole(self) -> str | None:
        found = self._either()
        if self._at < len(self._pattern):
            raise ValueError(f"/{self._pattern}/ has a bracket that nothing opens")
        return found.lark or None

    def _either(self) -> Piece:
        """Read alternatives, up to the end or to a closing bracket."""
        ways = [self._row()]
        while self._next() == "|":
            self._at += 1
            ways.append(self._row())
        if not any(way.lark for way in ways):
            return Piece("|".join(way.regex for way in ways))
        return Piece(lark=f"({' | '.join(map(self._rendered, ways))})")

    def _row(self) -> Piece:
        """Read what stands in a row."""
        parts: list[Piece] = []
        while (begin := self._next()) and begin not in "|)":
            one = self._repeated()
            if parts and not one.lark and not parts[-1].lark:
                one = Piece(parts.pop().regex + one.regex)
            parts.append(one)
        if len(parts) <= 1:
            return parts[0] if parts else Piece()
        return Piece(lark=" ".join(map(self._rendered, parts)))

    def _repeated(self) -> Piece:
        at = self._at
        one = self._group() if self._next() == "(" else self._atom()
        source = self._pattern[at : self._at]
        times = _TIMES.match(self._pattern, self._at)
        if times is None:
            return one
        self._at = times.end()
        if self._next() and self._next() in "?+":
            raise ValueError(f"'{times[0]}{self._next()}' can't stand in it: lazy and possessive repeats are not taken")
        if not one.lark:
            return Piece(one.regex + times[0])
        many = self._spellings(source, "+") if times[0] in "*+" and not source.startswith("(") else one.lark
        return Piece(lark=f"({many}){times[0]}")

    def _group(self) -> Piece:
        begin = _GROUP.match(self._pattern, self._at)
        assert begin is not None, "it begins with a bracket"
        self._at = begin.end()
        if self._next() == "?":
            raise ValueError(f"'(?{self._pattern[self._at + 1 : self._at + 2]}' can't stand in a regular expression")
        inner = self._either()
        if self._next() != ")":
            raise ValueError(f"/{self._pattern}/ has a bracket that nothing closes")
        self._at += 1
        return inner if inner.lark else Piece(f"(?:{inner.regex})")

    def _atom(self) -> Piece:
        begin, at = self._pattern[self._at], self._at
        if begin == "[":
            self._at = end_of_class(self._pattern, at)
        elif begin == "\\":
            match = _ESCAPE.match(self._pattern, at)
            self._at = at + 1 if match is None else match.end()
        else:
            self._at += 1
        atom = self._pattern[at : self._at]
        spelled = self._spellings(atom)
        return Piece(lark=f"({spelled})") if spelled else Piece(self._any if atom == "." else atom)

    def _spellings(self, atom: str, times: str = "") -> str:
        """Return the alternatives for a class; empty if JSON escapes none of its characters.

        `times`: of the characters that JSON does not escape.
        """
        atom = self._any if atom == "." else atom
        held = _held(atom)
        if not held:
            return ""
        others = [] if _is_one(atom) else [f"/[{_as_class(atom)}&&{_PLAIN}]{times}/{self._suffix}"]
        spellings = "|".join(re.escape(quoted_text(character)) for character in held)
        return " | ".join([*others, f"/{spellings}/"])

    def _rendered(self, piece: Piece) -> str:
        return piece.lark or (f"/{piece.regex.replace('/', chr(92) + '/')}/{self._suffix}" if piece.regex else '""')

    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]


def _is_one(atom: str) -> bool:
    """Return whether it is one character."""
    return not atom.startswith("[") and (len(atom) == 1 or atom[1] not in "dDwWsSpP")


def _as_class(atom: str) -> str:
    return atom if atom.startswith(("[", "\\")) else f"[{atom}]"


@lru_cache(maxsize=4096)
def _held(atom: str) -> str:
    """Return the characters of `_SPELLED` that the class `atom` holds, by llguidance's own judgement."""
    if len(atom) == 1:
        return atom if atom in _SPELLED else ""
    matcher = LLMatcher(_byte_tokens(), LLMatcher.grammar_from_regex(atom), log_level=0)
    if matcher.is_error():
        raise ValueError(f"{atom} can't stand in a regular expression")
    mask = matcher.compute_bitmask()  # a bit for each byte that may come first
    return "".join(character for character in _SPELLED if mask[ord(character) // 8] >> ord(character) % 8 & 1)


@lru_cache(maxsize=1)
def _byte_tokens() -> LLTokenizer:
    return LLTokenizer("byte")
