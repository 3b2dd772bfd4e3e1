"""Errors as Anthropic's API tells them."""

from typing import Any

from contracts.errors import TandemError
from gateway.error_codes import status_of

_TYPE = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error of an HTTP status.

    It has no field for `param`, so that the message names it.
    """
    if param and param not in message:
        message = f"{param}: {message}"
    kind = _TYPE.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def anthropic_error_of(error: TandemError) -> dict[str, Any]:
    """Return the body of an error of ours."""
    return anthropic_error(status_of(error.code), str(error), getattr(error, "param", None))
