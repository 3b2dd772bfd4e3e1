"""The body of a request, as far as it may reach."""

from collections.abc import Callable

from fastapi import Request

from contracts.errors import RequestError


async def read_body(request: Request, limit_nbytes: int, grown: Callable[[int], None] = lambda nbytes: None) -> bytes:
    """Counted as it comes: who sends in chunks names no length. Raises RequestError with code too_large as soon as the
    limit is passed, and what `grown` raises, which is told how long it is so far.
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
