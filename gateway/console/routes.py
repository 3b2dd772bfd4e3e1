"""Serves the console's files, and the state that it draws."""

import asyncio
import json
import logging
import time
from collections import deque
from importlib import resources
from typing import Any

import aiohttp
import msgspec
from fastapi import FastAPI, Response

from contracts.errors import Unavailable
from contracts.node import NodeInfo
from coordinator.store.store import Counts, Store, WorkerView
from gateway.dispatch.dispatcher import Dispatcher

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/console/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console/icon.svg": ("icon.svg", "image/svg+xml"),
    **{
        f"/console/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("theme", "main", "dom", "chat", "stream", "timing", "system", "account")
    },
}
"""Path -> file and type. They hold nothing secret: a browser has no key to show before the page asks for one."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
LOOK_PERIOD_S = 0.2
"""However many pages are open, the store and the workers are asked no more often than this."""
HEALTH_TIMEOUT_S = 1.0
MAX_ACCOUNTS = 24


def add_console(app: FastAPI, dispatch: Dispatcher, store: Store) -> None:
    accounts = RequestLog()
    requests = logging.getLogger("gateway.requests")
    requests.setLevel(logging.INFO)  # whatever of it is written: the page shows its requests
    requests.addHandler(accounts)
    looks = Looks(dispatch, store, accounts)
    for path, (name, kind) in FILES.items():
        _add_file(app, path, resources.files("gateway.console").joinpath(name).read_bytes(), kind)

    @app.get("/console/state", include_in_schema=False)
    async def state() -> Response:
        """What the console draws, as JSON. Needs the API key where one is set."""
        return Response(await looks.latest(), media_type="application/json", headers={"Cache-Control": "no-store"})


def _add_file(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    async def file() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    app.add_api_route(path, file, include_in_schema=False)


class RequestLog(logging.Handler):
    """The last lines of the request log, the one account of where a request's time went.

    No prompt is in it.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.latest: deque[dict[str, Any]] = deque(maxlen=MAX_ACCOUNTS)

    def emit(self, record: logging.LogRecord) -> None:
        facts = json.loads(record.getMessage())
        if "stages_s" in facts:  # not of a request that was refused before it was placed
            self.latest.appendleft(facts)


class Looks:
    """One look at the store and the workers serves all pages that ask within LOOK_PERIOD_S."""

    def __init__(self, dispatch: Dispatcher, store: Store, accounts: RequestLog) -> None:
        self._dispatch, self._store, self._accounts = dispatch, store, accounts
        self._looking = asyncio.Lock()
        self._state, self._state_s = b"", -LOOK_PERIOD_S

    async def latest(self) -> bytes:
        """Return the state as JSON. Without an answer of the store `trouble` says so, and has no workers."""
        async with self._looking:
            if time.monotonic() - self._state_s >= LOOK_PERIOD_S:
                self._state = msgspec.json.encode(await self._look())
                self._state_s = time.monotonic()
        return self._state

    async def _look(self) -> dict[str, Any]:
        workers, counts, trouble = [], Counts(), ""
        try:
            workers, counts = await asyncio.gather(self._store.workers(), self._store.counts())
        except Unavailable as error:
            trouble = str(error)
        return {
            "at_s": time.monotonic(),
            "trouble": trouble,
            "num_inflight": self._dispatch.num_inflight,
            "workers": await self._rows(workers),
            "states": counts.states,
            "ended": counts.ended,
            "accounts": list(self._accounts.latest),
        }

    async def _rows(self, workers: list[WorkerView]) -> list[dict[str, Any]]:
        connected = {info.worker_id for info in self._dispatch.workers.nodes}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)) as session:
            healths = await asyncio.gather(*(_health(session, view) for view in workers))
        return [
            _row(view, view.node.info.worker_id in connected, health)
            for view, health in zip(workers, healths, strict=True)
        ]


async def _health(session: aiohttp.ClientSession, view: WorkerView) -> dict[str, Any]:
    """The worker's own word, ten times fresher than the registry's; without it, `status` says why."""
    info: NodeInfo = view.node.info
    if not view.node.alive:
        return {"status": "dead: it has not beaten"}
    try:
        async with session.get(f"{info.url}/health") as response:
            health = await response.json()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return {"status": f"it does not answer: {type(error).__name__}"}
    if health.get("incarnation") != info.incarnation:
        return {"status": "another incarnation answers"}
    return health


def _row(view: WorkerView, is_connected: bool, health: dict[str, Any]) -> dict[str, Any]:
    """`core` is None while the worker does not answer; `load` is then what it last told the registry."""
    info, core = view.node.info, health.get("core")
    return {
        "worker_id": info.worker_id,
        "incarnation": info.incarnation,
        "role": info.role,
        "alive": view.node.alive,
        "connected": is_connected,
        "status": health["status"],
        "capacity_tokens": info.capacity_tokens,
        "load": (core or {}).get("load") or msgspec.to_builtins(view.node.load),
        "draining": view.node.load.draining,
        "num_of_former_role": health.get("num_of_former_role", view.node.load.num_of_former_role),
        "credits": {
            "pending_tokens": view.pending_tokens,
            "num_prefills": view.num_prefills,
            "reserved_tokens": view.reserved_tokens,
            "num_decodes": view.num_decodes,
        },
        "core": core,
    }
