"""A schema in words to which llguidance holds an answer exactly: some it takes too lightly."""

import math
import re
from typing import Any, TypeGuard

from gateway.grammar.schema_rewriter import rewritten

LEAST = 1e-30
"""Stands for the least number above 0: llguidance takes no bound with 100 digits."""

# Of a pattern as llguidance reads it, Rust's: a class by property, an escape, and other text; in brackets, what may
# stand before or amid a bracket that is no more than a character there.
_OUTSIDE = re.compile(r"\\(?:[pP](?:\{[^}\\]*\}|.)|.)?|[^\\\[]+", re.DOTALL)
_IN_CLASS = re.compile(r"\[\^?(?:-+|\])?|--|(?:\\.|[^\\\[\]])-[^\\\]-]|\\.?|[^\\\[]", re.DOTALL)

_NAMING = ("$defs", "definitions", "$id", "$schema", "$anchor", "title", "description")
"""What stays where others refer to it."""
_MIRRORED = {
    "minimum": "maximum",
    "maximum": "minimum",
    "exclusiveMinimum": "exclusiveMaximum",
    "exclusiveMaximum": "exclusiveMinimum",
}


def exact(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema in words that are held exactly; a copy, as far as it differs."""
    return rewritten(schema, _exact)


def _exact(node: dict[str, Any]) -> dict[str, Any]:
    if node.get("nullable") is True:
        node = _or_null(node)
    if isinstance(pattern := node.get("pattern"), str):
        node = node | {"pattern": without_nul(pattern)}
    if isinstance(by_pattern := node.get("patternProperties"), dict):
        node = node | {"patternProperties": {without_nul(key): value for key, value in by_pattern.items()}}
    return _above(_below(node))


def _or_null(node: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that null fits, too: OpenAPI 3.0's `nullable`, which llguidance passes over."""
    rest = {name: value for name, value in node.items() if name != "nullable"}
    kind, names = rest.get("type"), {name: rest[name] for name in _NAMING if name in rest}
    if isinstance(kind, str) and not rest.keys() & {"enum", "const", "anyOf", "oneOf", "allOf", "$ref"}:
        return rest | {"type": [kind, "null"]}
    inner = {name: value for name, value in rest.items() if name not in names}
    return names | {"anyOf": [inner, {"type": "null"}]} if inner else rest


def without_nul(pattern: str) -> str:
    """Return the same pattern, but that no class of characters has U+0000 in it.

    To llguidance, a class that has all control
    characters has all that JSON escapes: by [^"] a string could hold a quotation mark, and by [^\\\\] a backslash.
    """
    parts, at = [], 0
    while at < len(pattern):
        end = _end_of_token(pattern, at)
        token, at = pattern[at:end], end
        parts.append(rf"[{token}&&[^\x00]]" if token.startswith(("[", r"\p", r"\P")) else token)
    return "".join(parts)


def _end_of_token(pattern: str, at: int) -> int:
    match = _OUTSIDE.match(pattern, at)
    return end_of_class(pattern, at) if match is None else match.end()


def end_of_class(pattern: str, at: int) -> int:
    """The pattern's own end if it has none."""
    depth = 0
    for match in _IN_CLASS.finditer(pattern, at):
        depth += match[0].startswith("[") - (match[0] == "]")
        if depth == 0:
            return match.end()
    return len(pattern)


def _above(node: dict[str, Any]) -> dict[str, Any]:
    """Return the node with a lower bound that holds: llguidance lets 1 through for above 1, at most 1.5."""
    bound, upper = node.get("exclusiveMinimum"), min(_numbers(node, "maximum", "exclusiveMaximum"), default=math.inf)
    if not _is_number(bound) or bound < 0 or bound != math.trunc(bound) or not bound < upper < bound + 1:
        return node
    least = math.nextafter(bound, math.inf) if bound else LEAST
    rest = {name: value for name, value in node.items() if name != "exclusiveMinimum"}
    return rest | {"minimum": max([least, *_numbers(node, "minimum")])}


def _below(node: dict[str, Any]) -> dict[str, Any]:
    """The same on the other side of 0."""
    return _mirrored(_above(_mirrored(node)))


def _mirrored(node: dict[str, Any]) -> dict[str, Any]:
    bounds = {_MIRRORED[name]: -node[name] for name in _MIRRORED if _is_number(node.get(name))}
    return {name: value for name, value in node.items() if name not in _MIRRORED or not _is_number(value)} | bounds


def _numbers(node: dict[str, Any], *names: str) -> list[float]:
    return [node[name] for name in names if _is_number(node.get(name))]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
