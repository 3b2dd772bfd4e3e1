"""The words for how requests end, their HTTP status, and whose errors they are.

It imports nothing: `tandem top`, which is to start at once, counts by them, too.
"""

STATUS = {
    "invalid_request": 400,
    "unauthorized": 401,
    "not_found": 404,
    "method_not_allowed": 405,
    "too_large": 413,
    "unsupported_encoding": 415,
    "overloaded": 429,
    "unavailable": 503,
    "peer_lost": 503,
    "draining": 503,
    "adapter_missing": 503,
    "out_of_blocks": 503,
    "transfer_failed": 503,
    "corrupt": 503,
    "deadline_exceeded": 504,
}
"""HTTP status by an error's code; any other is 500."""

KNOWN = ("ok", "disconnected", *STATUS, "internal")
"""Ends that requests come to; any other is a fault of ours."""

NOT_OURS = frozenset({"ok", "disconnected", *(code for code, status in STATUS.items() if status < 500)})
"""Ends that are no error, an error of the client's, or refused because of load."""


def status_of(code: str) -> int:
    return STATUS.get(code, 500)


def code_of(status: int) -> str:
    """Return the code of what is refused before it is looked at; "internal" for a status not here."""
    return next((code for code, own in STATUS.items() if own == status), "internal")
