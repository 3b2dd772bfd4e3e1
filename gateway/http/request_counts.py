"""HTTP requests by endpoint and status, under the name that vLLM's dashboards ask for."""

from functools import cache

from prometheus_client import Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

UNCOUNTED = frozenset({"/metrics", "/health", "/ready", "/load", "/ping", "/version"})
"""What watches over the service, as with vLLM: it would drown what clients ask."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
LEFT = 499
"""The status of a request whose client left before it had an answer."""


class RequestCountMiddleware:
    """A count of requests by the path of their route: clients can't make series of their own."""

    def __init__(self, app: ASGIApp, requests: Counter) -> None:
        self._app = app
        self._count_of = cache(lambda handler, method, kind: requests.labels(handler, method, f"{kind}xx"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = LEFT

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            status = 500
            raise
        finally:
            self._count(scope, status)

    def _count(self, scope: Scope, status: int) -> None:
        handler, method = getattr(scope.get("route"), "path", "none"), scope["method"]
        if handler not in UNCOUNTED:
            self._count_of(handler, method if method in METHODS else "other", status // 100).inc()
