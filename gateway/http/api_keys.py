"""API keys: which clients may ask."""

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.console.routes import FILES
from gateway.tenants.tenant_accounts import TenantAccounts
from gateway.tenants.tenant_file import digest_of

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/metrics", "/version", *FILES})

OPERATORS_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})


class ApiKeyMiddleware:
    """A door for clients that show a key, while what watches over the service needs none.

    A key is shown as `Authorization: Bearer KEY`, or as `X-Api-Key: KEY`, as Anthropic's clients do. A request carries
    the account of the tenant whose key it shows. `refuse` makes the response for the others, with the words that it
    is given.
    """

    def __init__(
        self, app: ASGIApp, keys: str, refuse: Callable[[Request, str], Response], tenants: TenantAccounts
    ) -> None:
        self._app, self._refuse, self._tenants = app, refuse, tenants
        self._digests = frozenset(digest_of(key) for key in map(str.strip, keys.split(",")) if key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope):
            return await self._app(scope, receive, send)
        for key in _shown(Headers(scope=scope)):
            account = self._tenants.of_key(key)
            if account is not None and _is_operators(scope):
                why = "this shows or changes what is all tenants': it needs a key of TANDEM_API_KEY"
                return await self._refuse(Request(scope), why)(scope, receive, send)
            if account is not None or digest_of(key) in self._digests:
                scope.setdefault("state", {})["tenant"] = account
                return await self._app(scope, receive, send)
        response = self._refuse(Request(scope), "a valid API key is needed: Authorization: Bearer KEY")
        await response(scope, receive, send)


def _shown(headers: Headers) -> list[str]:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    tokens = [token] if scheme.lower() == "bearer" else []
    # Headers are read as Latin-1; a key with other letters came as UTF-8.
    shown = [*tokens, headers.get("x-api-key", "")]
    keys = [key.strip(" \t").encode("latin-1").decode(errors="surrogateescape") for key in shown]
    return [key for key in keys if key]


def _is_open(scope: Scope) -> bool:
    return _path(scope) in OPEN_PATHS


def _is_operators(scope: Scope) -> bool:
    """Return whether a path is not for tenants.

    It tells of others' requests, or changes what others are served.
    """
    return _path(scope).startswith("/console/") or _path(scope) in OPERATORS_PATHS


def _path(scope: Scope) -> str:
    """Return the path that is asked for. A proxy may leave its own in front."""
    return scope["path"].removeprefix(scope.get("root_path", ""))
