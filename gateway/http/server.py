"""The HTTP server."""

import asyncio
from typing import Any

import uvicorn
from fastapi import FastAPI

from gateway.api.error_body import error_body
from service.http_protocol import LimitedProtocol

KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than clients keep theirs (httpx 5 s, aiohttp 15 s, the upstream pools
of nginx and of cloud load balancers 60 s), so that it is they who close. A request that is written in the moment when
the server closes gets no answer, and to a client without retries that is a failure of the service.
"""
UNREAD_TIMEOUT_S = 30.0


def http_config(app: FastAPI) -> uvicorn.Config:
    """How the gateway is served."""
    return uvicorn.Config(
        app,
        http=Protocol,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=3,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


class Protocol(LimitedProtocol):
    """Closes a connection that does not read its answer, too."""

    _unread_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._forget_unread()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_unread()
        super().connection_lost(exc)

    def error(self, why: str) -> dict[str, Any]:
        return error_body(431, why)

    def _forget_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
