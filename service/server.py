"""The HTTP server (uvicorn) of a process that has more to shut down than that."""

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
    """A uvicorn server without its signal handlers, which would end the process too early.

    The process has other things to shut down first. A pause for lack of descriptors is logged once a minute, not as a
    traceback each time.
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
    """Tell the log and the watcher of `ready_file` that requests are answered from now on."""
    url = http_url(host, listener.getsockname()[1])
    log.info("serving at %s", url)
    ready_file.write({"pid": os.getpid(), "url": url})
