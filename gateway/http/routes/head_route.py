"""A route that answers HEAD, by which load balancers probe, wherever it answers GET."""

from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Receive, Scope, Send


class HeadAnsweringRoute(APIRoute):
    """A route whose HEAD is its GET without a body, which the server leaves out.

    FastAPI's own routes know HEAD only where they list it, and then describe it as an endpoint of its own.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(self._as_get(scope))

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().handle(self._as_get(scope), receive, send)

    def _as_get(self, scope: Scope) -> Scope:
        """Return a copy for HEAD: the server looks at its own scope, whose method stays."""
        is_head = scope["type"] == "http" and scope["method"] == "HEAD" and "GET" in (self.methods or ())
        return {**scope, "method": "GET"} if is_head else scope
