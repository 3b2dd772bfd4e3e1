"""What clients get for errors: one shape everywhere, under an id that the log has, too."""

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from contracts.errors import TandemError
from gateway.api.anthropic.error_body import anthropic_error
from gateway.api.error_body import OUR_FAULT, error_body, error_of, retry_headers
from gateway.error_codes import code_of
from gateway.http.request_ids import log_id

log = logging.getLogger("gateway.requests")


def add_error_handlers(app: FastAPI) -> None:
    """Let every error of `app` end in the one shape."""
    app.add_exception_handler(TandemError, _tandem_error)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _our_fault)


def unauthorized(request: Request, why: str) -> Response:
    """Return the answer to a client without a valid key."""
    return _refused(request, 401, "unauthorized", error_body(401, why), {"WWW-Authenticate": "Bearer"})


async def _tandem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    status, body = error_of(error)
    headers = retry_headers(error)
    if getattr(request.state, "is_body_late", False):
        headers["Connection"] = "close"  # nobody waits for the rest of that body
    return _refused(request, status, error.code, body, headers)


async def _disconnected(request: Request, error: Exception) -> Response:
    _note_end(request, log_id(request), 499, "disconnected", "the client left before its body had arrived")
    return Response(status_code=499)  # read by nobody


async def _our_fault(request: Request, error: Exception) -> Response:
    return _refused(request, 500, TandemError.code, error_body(500, OUR_FAULT))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    headers = {"Allow": _allowed(request)} if status == 405 else error.headers
    why = _no_path(request) if status == 404 else str(error.detail)
    return _refused(request, status, code_of(status), error_body(status, why), headers)


def _refused(
    request: Request, status: int, code: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    """Return `body` under the id by which the log has what is said of it."""
    request_id, message = log_id(request), body["error"]["message"]
    _note_end(request, request_id, status, code, message)
    if _is_anthropic(request):
        body = anthropic_error(status, message, body["error"]["param"]) | {"request_id": request_id}
    return JSONResponse(body, status, {**(headers or {}), "X-Request-Id": request_id})


def _note_end(request: Request, request_id: str, status: int, code: str, message: str) -> None:
    """Count and log a request that no answers were begun for.

    It has a trace if it came to where answers are begun.
    """
    context = request.app.state.context
    context.metrics.requests.labels(code).inc()
    path = request.url.path
    facts = {"id": request_id, "status": status, "code": code, "path": path[:200], "message": message[:500]}
    log.info("%s", json.dumps(facts))
    came_s = getattr(request.state, "came_s", None)
    if context.tracing is not None and came_s is not None:
        context.tracing.begin(path, request.headers).end(None, facts, came_s, time.monotonic())


def _is_anthropic(request: Request) -> bool:
    """Return whether the client asks as Anthropic's do, and reads errors so.

    A proxy may leave its own path in front.
    """
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def _no_path(request: Request) -> str:
    return f"the path '{request.url.path[:200]}' does not exist; GET /openapi.json lists those that do"


def _allowed(request: Request) -> str:
    """Return all methods of a path. Starlette names those of the first route with that path only."""
    path = request.url.path
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    methods = {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
