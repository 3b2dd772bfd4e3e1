"""The formats of strings that a grammar can hold an answer to. To JSON Schema the others are notes, and no rules."""

from typing import Any

KNOWN = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
"""To llguidance, which refuses a schema for any other."""

_VALUES = frozenset({"const", "enum"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def without_unknown_formats(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy, as far as it differs; generated schemas are full of `binary`, `password`, `file-path`."""
    try:
        return _pruned(schema)
    except RecursionError:  # deeper than llguidance reads: it is the one to refuse it
        return schema


def _pruned(part: Any, is_by_name: bool = False) -> Any:
    """`is_by_name`: its keys are names of schemas, and may be called what a keyword is."""
    if isinstance(part, list):
        return [_pruned(item) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        key: value if key in _VALUES and not is_by_name else _pruned(value, key in _BY_NAME and not is_by_name)
        for key, value in part.items()
        if not (key == "format" and isinstance(value, str) and value not in KNOWN)
    }
