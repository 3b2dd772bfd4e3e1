"""Long prompts at once: two handoffs are in flight for as long as two prefill workers compute. Not a test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

NUM_REPEATS = 30
RIDERS = ("Ann", "Bob", "Cleo", "Dan")


@asynccontextmanager
async def two_handoffs(url: str, where: str, num_riders: int = 2) -> AsyncIterator[None]:
    """Asks as this is entered, waits for the answers as it is left. Another `where` each time: a prompt that is known
    already is not computed again. Two prompts meet two workers, unless one of these was measured at twice the other's
    speed; of four, one does.
    """
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as asking:
        for rider in RIDERS[:num_riders]:
            asking.create_task(_ask(session, url, f"{rider} of {where}"))
        yield


async def _ask(session: aiohttp.ClientSession, url: str, rider: str) -> None:
    text = f"{rider} rode past the river, {rider} rode past the mill, {rider} rode past the train. " * NUM_REPEATS
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
