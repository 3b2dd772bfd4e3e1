"""The body of a request, as far as it may reach."""

from fastapi import Request

from contracts.errors import RequestError


async def read_body(request: Request, limit_nbytes: int) -> bytes:
    """Counted as it comes: who sends in chunks names no length. Raises RequestError with code too_large as soon as the
    limit is passed.
    """
    parts, nbytes = [], 0
    async for part in request.stream():
        parts.append(part)
        nbytes += len(part)
        if nbytes > limit_nbytes:
            error = RequestError(f"the body is longer than {limit_nbytes} bytes")
            error.code = "too_large"
            raise error
    return b"".join(parts)
