"""The ids of a request: the client's own, and those that are drawn."""

import re
import secrets

from fastapi import Request

_GIVEN = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def given_id(request: Request) -> str:
    """Return the id that the client gave, in its header or else in its body; empty if there is none."""
    given = request.headers.get("x-request-id", "") or getattr(request.state, "request_id", None) or ""
    return given if _GIVEN.fullmatch(given) else ""


def log_id(request: Request) -> str:
    """Return the id under which the log has a request that no answers were begun for."""
    return given_id(request) or secrets.token_hex(8)


def response_id(request: Request, prefix: str) -> str:
    """Return the id of a response: the client's own behind `prefix`, as with vLLM, or one that is drawn."""
    return f"{prefix}-{log_id(request)}"
