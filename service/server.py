"""uvicorn inside a process that has more to put away than its HTTP server."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from process.listener import is_accept_pause
from process.ready_file import ReadyFile
from process.sockets import http_url
from service.http_protocol import LimitedProtocol

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 60
"""How long an idle connection stays open: longer than our clients keep theirs (aiohttp: 15 s): they close first.

A job that is posted in the moment when the server closes gets no answer, and its request 503."""


class UvicornServer(uvicorn.Server):
    """A server of uvicorn's without its signal handlers, which end the process too early.

    It has things to put away first.
    That it pauses to accept while descriptors are short is in the log once a minute, not as a traceback each time.
    """

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_handle)
        await super().serve(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not is_accept_pause(context):
        loop.default_exception_handler(context)


@asynccontextmanager
async def serving(app: FastAPI, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """Serve `app` on `listener` inside the block; the task ends by itself only if the server fails."""
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = UvicornServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield task
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=CLOSE_TIMEOUT_S)


def announce(host: str, listener: socket.socket, ready_file: ReadyFile) -> None:
    """Tell the log, and whoever waits for `ready_file`, that from now on requests are answered."""
    url = http_url(host, listener.getsockname()[1])
    log.info("serving at %s", url)
    ready_file.write({"pid": os.getpid(), "url": url})
