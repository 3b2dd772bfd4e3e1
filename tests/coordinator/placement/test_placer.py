"""The view of a gateway, and the reads that keep it fresh."""

import asyncio
from collections.abc import Sequence

import pytest

from contracts.errors import Overloaded
from contracts.node import WorkerRole
from coordinator.placement.placer import MAX_CLAIMS, Placer
from coordinator.store.local_server import RedisServer
from coordinator.store.redis_store import RedisStore
from coordinator.store.store import Claim, Claimed
from testing.memory_store import MemoryStore
from tests.coordinator.coordinator_rig import ALIVE_LOAD, ask, fresh_pool, join, node


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


class FasterOthers(RedisStore):
    """A store in which others fill one side of what is offered just before each claim."""

    side, num_claims = "", 0

    async def claim(self, claim: Claim, prefixes: Sequence[tuple[bytes, bytes]] = ()) -> Claimed:
        field = "pending" if self.side == "prefill" else "reserved"
        for route in claim.routes:
            worker_id = claim.workers[getattr(route, self.side)].worker_id
            await self._connections.call("HSET", f"{self.prefix}node:{worker_id}", field, 10_000_000)
        self.num_claims += bool(claim.routes)
        return await super().claim(claim, prefixes)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("num_left", [0, 20])
async def test_who_is_outrun_each_time_is_refused_by_the_side_that_was_full(
    any_server: RedisServer, side: str, num_left: int
) -> None:
    """It is counted, whether the policy sees by then that none is left or still sees some."""
    store = FasterOthers(any_server.url, fresh_pool())
    store.side = side
    counts = dict.fromkeys(("prefill", "decode"), 4) | {side: 4 * MAX_CLAIMS + num_left}
    for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
        await join(store, *(node(f"{role.value[0]}{index:02}", role) for index in range(counts[role.value])))
    for info in [one.info for one in await store.nodes()]:
        await store.heartbeat(info.worker_id, info.incarnation, ALIVE_LOAD)
    placer = Placer(store)
    with pytest.raises(Overloaded, match=f"all {side} workers are full"):
        await placer.place(ask("r"))
    assert store.num_claims == MAX_CLAIMS
    found = await store.counts()
    assert (found.overloaded, found.placed) == (1, 0)
    for one in (placer, store):
        await one.close()
