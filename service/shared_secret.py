"""What only the services of a pool, and who runs them, may ask: the check, and the answer to everybody else."""

import hmac

from fastapi import Request
from fastapi.responses import JSONResponse


def refuse_without_secret(request: Request, secret: str) -> JSONResponse | None:
    """401 for who does not show the pool's secret as a bearer token, else None."""
    given = request.headers.get("authorization", "").encode("latin-1")  # the bytes that came
    if hmac.compare_digest(given, f"Bearer {secret}".encode()):
        return None
    return refusal(401, "auth_failed", "wrong or missing secret: all services of a pool share TANDEM_SECRET")


def refusal(status: int, code: str, message: str) -> JSONResponse:
    """In the shape that all services but the gateway have, which speaks as OpenAI does."""
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status)
