"""API keys: who may ask."""

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.console.routes import FILES
from gateway.replies import error_body

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics", "/version", *FILES})


class Keys:
    """Lets through who shows `Authorization: Bearer KEY` with one of the keys, and what watches over the service."""

    def __init__(self, app: ASGIApp, keys: str) -> None:
        self._app = app
        self._keys = [key.encode() for key in map(str.strip, keys.split(",")) if key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(Headers(scope=scope)):
            return await self._app(scope, receive, send)
        body = error_body(401, "a valid API key is needed: Authorization: Bearer KEY")
        await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        shown = given.strip().encode("latin-1")
        matches = [hmac.compare_digest(shown, key) for key in self._keys]  # all of them: how long tells nothing
        return any(matches) and scheme.lower() == "bearer"
