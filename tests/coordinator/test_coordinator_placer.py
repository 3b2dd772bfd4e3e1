"""The view of a gateway, and the reads that keep it fresh."""

import asyncio

from coordinator.placement.placer import Placer
from testing.memory_store import MemoryStore


async def test_a_read_that_is_over_is_not_awaited_again() -> None:
    """A placement may go on in the turn in which a read ends, before that is put away: to await it once more gives the
    loop no turn, and so it would never be.
    """
    placer = Placer(MemoryStore(alive_s=600.0))
    await placer.nodes()
    over = asyncio.create_task(asyncio.sleep(0))
    await over
    placer._reading, newest = over, placer._newest
    await placer._refresh(newest)
    assert placer._newest > newest
    placer._end_reading(over)  # late: the one that runs by then is another
    await placer.close()
