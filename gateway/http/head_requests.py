"""HEAD, by which load balancers probe: whatever answers GET answers it."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadRequestMiddleware:
    """Asks as GET; the server, which knows better, sends no body. FastAPI's routes know HEAD only where they list it,
    and then describe it as an endpoint of its own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)
