"""The check of the pool's secret, and the answer to requests without it."""

import hmac

from fastapi import Request
from fastapi.responses import JSONResponse


def refuse_without_secret(request: Request, secret: str) -> JSONResponse | None:
    """Return a 401 unless the request has the pool's secret as a bearer token, else None."""
    given = request.headers.get("authorization", "").encode("latin-1")  # the bytes as they arrived
    if hmac.compare_digest(given, f"Bearer {secret}".encode()):
        return None
    return refusal(401, "auth_failed", "wrong or missing secret: all services of a pool share TANDEM_SECRET")


def refusal(status: int, code: str, message: str) -> JSONResponse:
    """Return an error in the form of all services but the gateway, which has OpenAI's."""
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status)
