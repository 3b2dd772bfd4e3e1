"""Claims whose answers are lost: whoever gives up then leaves no credit behind for the time of a lease."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from checkpoint import Checkpoint
from contracts.errors import Unavailable
from contracts.ids import Epoch, GatewayId, RequestId
from coordinator.request_states import RequestState
from coordinator.store.local_server import RedisServer
from coordinator.store.redis_store import RedisStore
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.registry_client import StorePlacement
from gateway.generation.generation_state import GenerationState
from gateway.prompting.chat_template import Prompting
from tests.coordinator.coordinator_rig import ask, assert_idle, credits, fresh_pool, pair, place
from tests.coordinator.muting import muting
from tests.gateway import gateway_wires
from tests.waiting import async_until

G = GatewayId("g")
R = RequestId("r")


class Rig:
    """A gateway's dispatcher whose way to Redis can be muted, and a store of the same pool that always hears."""

    def __init__(self, port: int, there: RedisStore, sent: list[str], prompting: Prompting) -> None:
        pool = there.prefix.split("{")[1].split("}")[0]
        self.store = RedisStore(f"redis://127.0.0.1:{port}/0", pool)
        self.placement = StorePlacement(self.store, G)
        self.dispatch = Dispatcher(self.placement, G, "secret", "model")
        self.there, self.sent, self.prompting = there, sent, prompting

    def answer(self) -> GenerationState:
        return GenerationState(gateway_wires.ask(10), self.prompting, ())

    def mute(self) -> None:
        self.sent[:] = ["mute"]

    async def is_idle(self) -> bool:
        return set((await credits(self.there)).values()) == {(0, 0, 0, 0)}


@pytest.fixture
async def one(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint) -> AsyncIterator[Rig]:
    monkeypatch.setattr("gateway.dispatch.registry_client.PATIENCE_S", 0.0)
    async with muting(redis_server.port) as (port, sent):
        there = RedisStore(redis_server.url, fresh_pool())
        await pair(there)
        rig = Rig(port, there, sent, Prompting(checkpoint))
        await rig.placement.place(RequestId("warm"), Epoch(1), [1] * 10, 5, ())
        await rig.placement.finish(RequestId("warm"), Epoch(1), RequestState.FINISHED)
        yield rig
        for part in (rig.placement, there):
            await part.close()


async def test_the_first_place(one: Rig) -> None:
    """The claim was taken, and nobody heard: cancelling a request that never began gives it back."""
    one.mute()
    with pytest.raises(Unavailable, match="does not answer"):
        await one.dispatch.begin(R, one.answer(), lambda _: None, 1e9)
    assert (await credits(one.there))["p0"][1] == 1
    one.dispatch.cancel(R, "the client left")
    one.sent.clear()
    await async_until(one.is_idle)
    await assert_idle(one.there)
    assert (await one.there.counts()).ended == {"FINISHED": 1, "CANCELLED": 1}


async def test_a_client_that_leaves_meanwhile(one: Rig) -> None:
    one.mute()
    beginning = asyncio.create_task(one.dispatch.begin(R, one.answer(), lambda _: None, 1e9))
    await async_until(lambda: "EVALSHA" in one.sent)
    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
    one.sent.clear()
    await async_until(one.is_idle)
    assert (await one.there.counts()).ended == {"FINISHED": 1, "CANCELLED": 1}


async def test_a_place_for_the_next_attempt(one: Rig) -> None:
    """The end is told of the attempt that was asked for, not of the last whose place is known."""
    await one.dispatch.begin(R, one.answer(), lambda _: None, 1e9)
    live = one.dispatch._live[R]
    live.answer.restart(Epoch(2))
    await place(one.there, ask("r", epoch=2, gateway_id=G))  # as the store took it, unheard
    one.dispatch.cancel(R, "the client left")
    await async_until(one.is_idle)


async def test_a_claim_that_comes_after_the_end(one: Rig) -> None:
    """It lay in the buffers of a connection: the end is of its epoch, whether the request was known or not."""
    await one.placement.finish(R, Epoch(1), RequestState.CANCELLED)
    await place(one.there, ask("s", gateway_id=G))
    await one.placement.finish(RequestId("s"), Epoch(2), RequestState.CANCELLED)
    for late in (ask("r", gateway_id=G), ask("s", epoch=2, gateway_id=G)):
        with pytest.raises(Unavailable, match="has ended"):
            await place(one.there, late)
    await assert_idle(one.there)
