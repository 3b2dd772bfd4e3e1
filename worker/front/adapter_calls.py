"""The calls of a front to its core that load and unload LoRA adapters."""

import asyncio
from itertools import count

from contracts.errors import RequestError, Unavailable
from contracts.request import AdapterRef
from worker.front.core_process import CoreProcess
from worker.messages import AdapterReply, LoadAdapter, UnloadAdapter

TIMEOUT_S = 60.0
"""The longest wait for a reply, in seconds: the core reads an adapter between two steps, perhaps from a slow disk."""


class AdapterCalls:
    """The calls that wait for replies; all on one event loop."""

    def __init__(self, core: CoreProcess) -> None:
        self._core, self._numbers = core, count()
        self._open: dict[int, asyncio.Future[AdapterReply]] = {}

    async def load(self, name: str, path: str) -> tuple[AdapterRef, ...]:
        """Load an adapter; return all that are loaded then.

        Raises RequestError for one that can't be served, Unavailable if the core does not answer.
        """
        return await self._reply(LoadAdapter(next(self._numbers), name, path))

    async def unload(self, name: str) -> tuple[AdapterRef, ...]:
        """Forget an adapter; return all that are loaded then. Raises as `load` does."""
        return await self._reply(UnloadAdapter(next(self._numbers), name))

    def answer(self, reply: AdapterReply) -> None:
        """Hand a reply to whoever waits for it."""
        waiting = self._open.get(reply.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    async def _reply(self, message: LoadAdapter | UnloadAdapter) -> tuple[AdapterRef, ...]:
        waiting = self._open[message.number] = asyncio.get_running_loop().create_future()
        self._core.send(message)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reply = await waiting
        except TimeoutError as error:
            raise Unavailable(f"the engine core has not answered within {TIMEOUT_S:.0f} s") from error
        finally:
            del self._open[message.number]
        if reply.error:
            raise RequestError(reply.error)
        return reply.adapters
