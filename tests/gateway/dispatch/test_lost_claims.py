"""Claims whose answers are lost: whoever gives up then leaves no credit behind for the time of a lease."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from checkpoint import Checkpoint
from contracts.errors import RegistryError, Unavailable
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.node import WorkerRole
from contracts.request import Route, WorkerRef
from coordinator.request_states import RequestState
from coordinator.store.local_server import RedisServer
from coordinator.store.redis_store import RedisStore
from coordinator.store.store import StateTransition
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.registry_client import StorePlacement
from gateway.generation.generation_state import GenerationState
from gateway.prompting.chat_template import Prompting
from tests.coordinator.coordinator_rig import ask, assert_idle, credits, fresh_pool, join, node, pair, place
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


async def moving(one: Rig, epoch: int) -> Route:
    """Take a place at d1 for the answer that d0 decodes, as soon as the gateway knows d1."""
    source = WorkerRef(WorkerId("d0"), Incarnation("a"), "", "")
    while True:
        try:
            return await one.placement.place_migration(R, Epoch(epoch), source, 15, ())
        except RegistryError:
            raise
        except Unavailable:
            await asyncio.sleep(0.05)


async def decoded(one: Rig) -> None:
    """Place a request, and let d0 decode it; d1 comes later."""
    route = await one.placement.place(R, Epoch(1), [1] * 10, 5, ())
    assert route.decode.worker_id == "d0"
    states = RequestState.QUEUED, RequestState.RESERVING, RequestState.TRANSFERRING, RequestState.COMMITTED
    assert all(await one.there.advance([StateTransition(R, Epoch(1), state) for state in states]))
    await join(one.there, node("d1", WorkerRole.DECODE))


async def has_decodes(one: Rig, **expected: int) -> bool:
    return {name: row[3] for name, row in (await credits(one.there)).items() if name in expected} == expected


async def test_a_place_of_a_migration_of_which_nobody_heard_goes_back_while_the_answer_runs(one: Rig) -> None:
    await decoded(one)
    await moving(one, 2)
    await one.placement.end_migration(R, Epoch(2), is_moved=False)
    one.mute()
    with pytest.raises(RegistryError, match="does not answer"):
        await moving(one, 3)
    assert await has_decodes(one, d0=1, d1=1)
    one.sent.clear()
    await async_until(lambda: has_decodes(one, d0=1, d1=0))
    await one.placement.finish(R, Epoch(1), RequestState.FINISHED)
    await async_until(one.is_idle)


async def test_that_an_answer_has_moved_is_told_once_the_registry_answers(
    one: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await decoded(one)
    route = await moving(one, 2)

    async def unreachable(*_: object) -> bool:
        raise RegistryError("the registry does not answer", "does not answer")

    with monkeypatch.context() as away:
        away.setattr(one.store, "_run", unreachable)
        await one.placement.end_migration(R, route.epoch, is_moved=True)
        await asyncio.sleep(0.3)
    assert await has_decodes(one, d0=1, d1=1)
    await one.placement.end_migration(R, Epoch(1), is_moved=True)  # another one changes nothing
    await async_until(lambda: has_decodes(one, d0=0, d1=1))
    await one.placement.finish(R, route.epoch, RequestState.FINISHED)
    await async_until(one.is_idle)
