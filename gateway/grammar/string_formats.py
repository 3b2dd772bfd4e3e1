"""The formats of strings that a grammar can hold an answer to.

To JSON Schema the others are notes, and no rules.
"""

from typing import Any

from gateway.grammar.schema_rewriter import rewritten

KNOWN = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
"""To llguidance, which refuses a schema for any other."""


def without_unknown_formats(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy, as far as it differs; generated schemas are full of `binary`, `password`, `file-path`."""
    return rewritten(schema, _without_unknown)


def _without_unknown(part: dict[str, Any]) -> dict[str, Any]:
    given = part.get("format")
    is_unknown = isinstance(given, str) and given not in KNOWN
    return {key: value for key, value in part.items() if key != "format"} if is_unknown else part
