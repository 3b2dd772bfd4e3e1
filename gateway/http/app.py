"""The gateway's HTTP application: its endpoints, errors, keys and CORS."""

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from gateway.http.api_keys import ApiKeyMiddleware
from gateway.http.context import AppContext
from gateway.http.error_handlers import add_error_handlers, unauthorized
from gateway.http.request_counts import RequestCountMiddleware
from gateway.http.routes import (
    adapters,
    embeddings,
    generation,
    health,
    messages,
    models,
    render,
    responses,
    scores,
    tokenize,
)


def make_app(context: AppContext) -> FastAPI:
    """Return the application that serves `context`."""
    app = FastAPI(title="Tandem", version=context.version, redoc_url=None)
    app.root_path = context.settings.root_path  # as a server's, it would be put in front of paths that have it
    app.state.context = context
    _add_access(app, context)
    app.add_middleware(RequestCountMiddleware, requests=context.metrics.http_requests)
    add_error_handlers(app)
    for subject in (generation, responses, messages, embeddings, scores, render, tokenize, models, adapters, health):
        app.router.routes += subject.router.routes
    return app


def _add_access(app: FastAPI, context: AppContext) -> None:
    keys = context.settings.api_key.get_secret_value()
    if keys or context.settings.tenants is not None:
        app.add_middleware(ApiKeyMiddleware, keys=keys, refuse=unauthorized, tenants=context.tenants)
    origins = [origin for origin in map(str.strip, context.settings.cors_origins.split(",")) if origin]
    if origins:  # outside of the keys: a browser asks beforehand, and shows none
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
