"""The reading of a request's body, up to a limit."""

from collections.abc import Callable

from fastapi import Request

from contracts.errors import RequestError


async def read_body(request: Request, limit_nbytes: int, grown: Callable[[int], None] = lambda nbytes: None) -> bytes:
    """Return the body, counted as it arrives, since chunked bodies state no length.

    Raise RequestError with code too_large as soon as the limit is passed, and what `grown` raises, which is called with
    the length so far.
    """
    parts, nbytes = [], 0
    async for part in request.stream():
        parts.append(part)
        nbytes += len(part)
        if nbytes > limit_nbytes:
            error = RequestError(f"the body is longer than {limit_nbytes} bytes")
            error.code = "too_large"
            raise error
        grown(nbytes)
    return b"".join(parts)
