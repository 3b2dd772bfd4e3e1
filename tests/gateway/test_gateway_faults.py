"""Clients that leave, workers that refuse, break or go silent: every answer ends once, and both workers are freed."""

import json

import httpx
import pytest
from gateway_rig import SECRET, gateway, pair

from contracts.ids import WorkerId
from contracts.node import Role
from gateway.fake_worker import FakeWorker

ASK = {"prompt": "one two three", "max_tokens": 500}


async def test_a_client_that_leaves_frees_both(checkpoint):
    async with gateway(checkpoint, pair(period_s=0.02)) as rig:
        for stream in (True, False):
            with pytest.raises(httpx.ReadTimeout):
                async with httpx.AsyncClient(timeout=0.3) as client:
                    await (_hang_up(client, rig.url) if stream else _wait_in_vain(client, rig.url))
            await rig.until(rig.is_idle)
        assert all(len(worker.cancels) == 2 for worker in rig.workers)


async def _wait_in_vain(client: httpx.AsyncClient, url: str) -> None:
    await client.post(f"{url}/v1/completions", json=ASK)


async def _hang_up(client: httpx.AsyncClient, url: str) -> None:
    async with client.stream("POST", f"{url}/v1/completions", json=ASK | {"stream": True}) as reply:
        await anext(reply.aiter_lines())
    raise httpx.ReadTimeout("left")


async def test_a_broken_event_stream_ends_the_answer_with_an_error_event(checkpoint):
    async with gateway(checkpoint, pair(period_s=0.02)) as rig, httpx.AsyncClient(timeout=10) as client:
        async with client.stream("POST", f"{rig.url}/v1/completions", json=ASK | {"stream": True}) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            rig.workers[1].break_streams()
            data = [line[6:] async for line in lines if line]
        assert data[-1] == "[DONE]"
        assert json.loads(data[-2])["error"]["code"] == 503
        await rig.until(rig.is_idle)


async def test_a_refused_job_is_placed_once_more_without_the_refuser(checkpoint):
    workers = [FakeWorker(WorkerId(f"m{i}"), Role.MIXED, SECRET, refuse=503 * (i == 0)) for i in range(2)]
    async with gateway(checkpoint, workers) as rig, httpx.AsyncClient(timeout=10) as client:
        reply = await client.post(f"{rig.url}/v1/completions", json=ASK | {"max_tokens": 3})
        assert reply.status_code == 200
        assert [epoch for _, epoch in rig.store.placed] == [1, 2]
        workers[1].refuse = 503
        assert (await client.post(f"{rig.url}/v1/completions", json=ASK)).status_code == 503


async def test_the_deadline_answers_504(checkpoint):
    async with gateway(checkpoint, pair(period_s=0.1), request_timeout_s=0.3) as rig:
        async with httpx.AsyncClient(timeout=10) as client:
            assert (await client.post(f"{rig.url}/v1/completions", json=ASK)).status_code == 504
        await rig.until(rig.is_idle)


async def test_without_a_decode_worker_it_is_not_ready(checkpoint):
    workers = pair()
    async with gateway(checkpoint, workers) as rig, httpx.AsyncClient() as client:
        assert (await client.get(f"{rig.url}/ready")).status_code == 200
        rig.store.dead = {WorkerId("d0")}
        await rig.until(lambda: len(rig.front.dispatch.workers.nodes) == 1)
        assert (await client.get(f"{rig.url}/ready")).status_code == 503


async def test_a_worker_that_the_registry_forgets_ends_what_it_runs(checkpoint):
    async with gateway(checkpoint, pair(period_s=0.02)) as rig, httpx.AsyncClient(timeout=30) as client:
        async with client.stream(
            "POST", f"{rig.url}/v1/completions", json=ASK | {"max_tokens": 60, "stream": True}
        ) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            rig.store.dead = {WorkerId("d0")}
            await rig.until(lambda: len(rig.front.dispatch.workers.nodes) == 1)
            data = [line[6:] async for line in lines if line]
        assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"
        assert (await client.get(f"{rig.url}/ready")).status_code == 503
