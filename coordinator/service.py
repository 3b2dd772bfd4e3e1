"""The coordinator's HTTP face: health, metrics, and the workers for people.

Placement does not pass through here: it is Lua in Redis. Several coordinators may run; one of them reaps.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from contracts.errors import Unavailable
from coordinator.metrics import RedisTimes, render
from coordinator.reaper import Reaper
from coordinator.role_balancer import RoleBalancer
from coordinator.store.store import Store
from service.shared_secret import refusal, refuse_without_secret


def make_app(store: Store, secret: str, times: RedisTimes, role_objective_s: float = 0.0) -> FastAPI:
    """Return the application, which reaps while it runs, and with an objective balances roles.

    `secret`: what `GET /nodes` must carry as a bearer token.
    """
    reaper = Reaper(store)
    balancer = RoleBalancer(store, secret, role_objective_s, lambda: reaper.is_leader) if role_objective_s else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        tasks = [asyncio.create_task(reaper.run())]
        if balancer is not None:
            tasks.append(asyncio.create_task(balancer.run()))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    app = FastAPI(title="Tandem coordinator", docs_url=None, redoc_url=None, lifespan=lifespan)
    _add_health(app, store, reaper, balancer)
    _add_views(app, store, reaper, secret, times)
    return app


def _add_health(app: FastAPI, store: Store, reaper: Reaper, balancer: RoleBalancer | None) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while its loop runs. Redis being away is no reason to restart this process."""
        status, word = (200, "ok") if reaper.is_running else (503, "the reaper has ended; see the log")
        if balancer is not None and not balancer.is_running:
            status, word = 503, "the balancer of roles has ended; see the log"
        facts = {"status": word, "redis": reaper.is_connected, "leader": reaper.is_leader}
        return JSONResponse(facts, status_code=status)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """200 while Redis answers."""
        try:
            await store.ping()
        except Unavailable as error:
            return _error(error)
        return JSONResponse({"status": "ok"})


def _add_views(app: FastAPI, store: Store, reaper: Reaper, secret: str, times: RedisTimes) -> None:
    @app.get("/nodes")
    async def nodes(request: Request) -> Response:
        """Every known worker: who it is, how busy, whether it lives, and the credits taken on it."""
        if strange := refuse_without_secret(request, secret):
            return strange
        try:
            return Response(msgspec.json.encode(await store.workers()), media_type="application/json")
        except Unavailable as error:
            return _error(error)

    @app.get("/metrics")
    async def metrics() -> Response:
        workers, counts = [], None
        if reaper.is_connected:  # else Redis may answer these all the same, with workers whose heartbeats it refuses
            with suppress(Unavailable):
                workers, counts = await store.workers(), await store.counts()
        return Response(render(workers, counts, reaper.is_leader, times), media_type="text/plain; version=0.0.4")


def _error(error: Unavailable) -> JSONResponse:
    return refusal(503, error.code, str(error))
