"""API keys: which clients may ask."""

import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.console.routes import FILES

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics", "/version", *FILES})


class ApiKeyMiddleware:
    """A door for clients that show one of the keys, while what watches over the service needs none.

    They show it as `Authorization: Bearer KEY`, or as `X-Api-Key: KEY`, as Anthropic's clients do.
    `refuse` makes the response for the others, with the words that it is given.
    """

    def __init__(self, app: ASGIApp, keys: str, refuse: Callable[[Request, str], Response]) -> None:
        self._app, self._refuse = app, refuse
        self._keys = [key.encode() for key in map(str.strip, keys.split(",")) if key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope) or self._knows(Headers(scope=scope)):
            return await self._app(scope, receive, send)
        response = self._refuse(Request(scope), "a valid API key is needed: Authorization: Bearer KEY")
        await response(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        tokens = [given] if scheme.lower() == "bearer" else []
        shown = [token.strip().encode("latin-1") for token in (*tokens, headers.get("x-api-key", ""))]
        # All of them: how long it takes tells nothing.
        return any([hmac.compare_digest(one, key) for one in shown for key in self._keys])


def _is_open(scope: Scope) -> bool:
    """A proxy may leave its own path in front."""
    return scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS
