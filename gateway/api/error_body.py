"""The one shape of an error's body, and when to come again."""

from math import ceil
from typing import Any

from contracts.errors import TandemError
from gateway.error_codes import status_of

_TYPE = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    413: "BadRequestError",
    415: "BadRequestError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}

OUR_FAULT = "internal error; see the gateway's log"


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPE.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_of(error: TandemError) -> tuple[int, dict[str, Any]]:
    status = status_of(error.code)
    return status, error_body(status, str(error), getattr(error, "param", None))


def retry_headers(error: TandemError) -> dict[str, str]:
    """Return the header that says when to come again, in whole seconds.

    What is refused because of load, or of a worker that is gone, has one.
    """
    if status_of(error.code) not in (429, 503):
        return {}
    return {"Retry-After": str(max(1, ceil(getattr(error, "retry_after_s", 1.0))))}
