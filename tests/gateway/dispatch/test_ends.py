"""What the coordinator is told of each request's end, and that nothing of it stays behind there."""

import asyncio

import httpx
import pytest

from contracts.errors import Unavailable
from coordinator.store.store import Counts, Store
from tests.coordinator.coordinator_rig import reap
from tests.gateway.gateway_rig import coordinated, gateway, pair

pytestmark = pytest.mark.slow

ASK = {"prompt": "one two three", "max_tokens": 4}
LONG = {"prompt": "one two three", "max_tokens": 400}


async def settled(store: Store, before: Counts) -> dict[str, int]:
    """Ends since `before`, once nothing is live and no credit is out."""
    async with asyncio.timeout(60):
        while (now := await store.counts()).states or now.ended == before.ended:
            await asyncio.sleep(0.01)
    assert {(w.pending_tokens, w.num_prefills, w.reserved_tokens, w.num_decodes) for w in await store.workers()} == {
        (0, 0, 0, 0)
    }
    ends = {state: now.ended[state] - before.ended.get(state, 0) for state in now.ended}
    return {state: count for state, count in ends.items() if count}


async def complete(client: httpx.AsyncClient, rig) -> None:
    assert (await client.post("/v1/completions", json=ASK)).status_code == 200


async def stop_string(client: httpx.AsyncClient, rig) -> None:
    reply = await client.post("/v1/completions", json=LONG | {"stop": " two"})
    assert reply.json()["choices"][0]["finish_reason"] == "stop"


async def leave(client: httpx.AsyncClient, rig) -> None:
    await rig.leave(client, LONG, lambda: rig.workers[1].num_running)


async def leave_stream(client: httpx.AsyncClient, rig) -> None:
    async with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply:
        await anext(reply.aiter_lines())


async def lose_a_worker(client: httpx.AsyncClient, rig) -> None:
    asking = asyncio.create_task(client.post("/v1/completions", json=LONG))
    await rig.until(lambda: rig.workers[1].num_running)
    await rig.workers[1].stop()
    assert (await asking).status_code == 503  # nobody else is there


async def refused(client: httpx.AsyncClient, rig) -> None:
    for worker in rig.workers:
        worker.refuse = 503
    assert (await client.post("/v1/completions", json=ASK)).status_code == 503


async def too_late(client: httpx.AsyncClient, rig) -> None:
    assert (await client.post("/v1/completions", json=LONG)).status_code == 504


async def stop_the_gateway(client: httpx.AsyncClient, rig) -> None:
    asking = asyncio.create_task(client.post("/v1/completions", json=LONG))
    await rig.until(lambda: rig.workers[1].num_running)
    await rig.front.dispatch.stop()
    assert (await asking).status_code == 503
    assert (await client.post("/v1/completions", json=ASK)).status_code == 503


@pytest.mark.parametrize(
    ("act", "settings", "end"),
    [
        (complete, {}, "FINISHED"),
        (stop_string, {}, "FINISHED"),
        (leave, {}, "CANCELLED"),
        (leave_stream, {}, "CANCELLED"),
        (lose_a_worker, {}, "FAILED"),
        (refused, {}, "FAILED"),
        (too_late, {"request_timeout_s": 1.5}, "FAILED"),
        (stop_the_gateway, {}, "FAILED"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_the_store_counts_the_true_end(checkpoint, store, act, settings, end, monkeypatch):
    monkeypatch.setattr("gateway.dispatch.attempt_budget.REPLAY_WAIT_S", 0.3)
    before = await store.counts()
    async with coordinated(checkpoint, pair(period_s=0.02), store, **settings) as rig:
        async with rig.client() as client:
            await act(client, rig)
        assert await settled(store, before) == {end: 1}


async def test_what_is_being_placed_when_the_gateway_stops_ends_too(checkpoint, store, monkeypatch):
    """No worker gets it, and no credit stays with it."""
    before, asked, going = await store.counts(), asyncio.Event(), asyncio.Event()
    async with coordinated(checkpoint, pair(), store) as rig, rig.client() as client:
        place = rig.store.place

        async def slowly(*args):
            asked.set()
            await going.wait()
            return await place(*args)

        monkeypatch.setattr(rig.store, "place", slowly)
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await asked.wait()
        stopping = asyncio.create_task(rig.front.dispatch.stop())
        await asyncio.sleep(0.05)
        going.set()
        assert (await asking).status_code == 503
        await stopping
        assert not any(worker.jobs for worker in rig.workers)
        assert await settled(store, before) == {"FAILED": 1}


async def test_what_ends_while_the_store_is_away_gives_its_credits_back(checkpoint, store, monkeypatch):
    """The end is never told; the lease that it had runs out, whatever else the gateway keeps alive."""
    monkeypatch.setattr("gateway.dispatch.registry_client.LEASE_S", 2.0)
    monkeypatch.setattr("gateway.dispatch.dispatcher.RENEW_PERIOD_S", 0.05)

    async def away(*args):
        raise Unavailable("Redis does not answer")

    async with coordinated(checkpoint, pair(period_s=0.02), store) as rig, rig.client() as client:
        going = asyncio.create_task(client.post("/v1/completions", json=LONG | {"max_tokens": 1500}, timeout=60))
        try:
            await rig.until(lambda: rig.workers[1].num_running)
            with monkeypatch.context() as outage:
                outage.setattr(store, "finish", away)
                await asyncio.gather(*(client.post("/v1/completions", json=ASK) for _ in range(5)))
            await reaped(store, num_left=1)
            await asyncio.sleep(2.5)
            assert await reap(store) == []  # what goes on keeps its lease
        finally:
            going.cancel()


async def reaped(store: Store, num_left: int) -> None:
    async with asyncio.timeout(60):
        while sum(worker.num_decodes for worker in await store.workers()) > num_left:
            await reap(store)
            await asyncio.sleep(0.05)


async def test_a_choice_that_fails_cancels_the_others(checkpoint, store):
    before = await store.counts()
    async with coordinated(checkpoint, pair(period_s=0.02), store) as rig:
        async with rig.client() as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=LONG | {"n": 3}))
            await rig.until(lambda: rig.workers[1].num_running == 3)
            rig.workers[1].fail(rig.workers[1].jobs[1])
            assert (await asking).status_code == 500
        assert await settled(store, before) == {"FAILED": 1, "CANCELLED": 2}
        assert rig.front.admission.num_taken == 0


async def test_those_who_wait_for_a_place_count_against_the_limit(checkpoint, monkeypatch):
    async with gateway(checkpoint, pair(), max_inflight=2) as rig:
        going, place = asyncio.Event(), rig.store.place

        async def slowly(*args):
            await going.wait()
            return await place(*args)

        monkeypatch.setattr(rig.store, "place", slowly)
        async with rig.client() as client:
            asking = [asyncio.create_task(client.post("/v1/completions", json=ASK)) for _ in range(5)]
            await rig.until(lambda: sum(task.done() for task in asking) == 3)
            going.set()
            codes = sorted([(await task).status_code for task in asking])
        assert codes == [200, 200, 429, 429, 429]
        assert rig.front.admission.num_taken == 0
