"""The way through a JSON schema, by which its parts are written anew."""

from collections.abc import Callable
from typing import Any

_VALUES = frozenset({"const", "enum"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})

Rule = Callable[[dict[str, Any]], dict[str, Any]]


def rewritten(schema: dict[str, Any], rule: Rule) -> dict[str, Any]:
    """A copy, each part of which is what `rule` makes of it. What is a value and no schema stays."""
    try:
        return _rewritten(schema, rule)
    except RecursionError:  # deeper than llguidance reads: it is the one to refuse it
        return schema


def _rewritten(part: Any, rule: Rule, is_by_name: bool = False) -> Any:
    """`is_by_name`: its keys are names of schemas, and may be called what a keyword is."""
    if isinstance(part, list):
        return [_rewritten(item, rule) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        key: value if key in _VALUES and not is_by_name else _rewritten(value, rule, key in _BY_NAME and not is_by_name)
        for key, value in (part if is_by_name else rule(part)).items()
    }
