"""Clients that leave, and what is not done for them any more.

This is for requests that are prepared; gateway.http.streaming_response ends an answer under way, whose run then frees
its workers.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from contracts.errors import DeadlineExceeded

Result = TypeVar("Result")


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has; by whoever has read the body."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(request: Request, timeout_s: float, preparing: Coroutine[Any, Any, Result]) -> Result:
    """Prepare no longer than the request has time, or than its client is there.

    Raises what `preparing` raises, DeadlineExceeded, and ClientDisconnect.
    """
    working, leaving = asyncio.create_task(preparing), asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        left_s = max(0.0, request.state.started_s + timeout_s - time.monotonic())
        await asyncio.wait({working, leaving}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if leaving.done():
            raise ClientDisconnect
        raise DeadlineExceeded(f"preparing the prompt and its grammar took longer than {timeout_s:g} s")
    finally:
        working.cancel()
        leaving.cancel()
