"""What /metrics says after requests of every end, under our names and under those that vLLM's dashboards ask for."""

import asyncio
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.gateway_rig import gateway, pair

pytestmark = pytest.mark.slow

ASK = {"prompt": "one two three", "max_tokens": 4}
DASHBOARDS = """e2e_request_latency_seconds_bucket time_to_first_token_seconds_sum inter_token_latency_seconds_count
request_time_per_output_token_seconds_bucket num_requests_running num_requests_waiting prompt_tokens_total
generation_tokens_total request_success_total request_queue_time_seconds_sum request_prefill_time_seconds_sum
request_decode_time_seconds_sum request_prompt_tokens_bucket request_generation_tokens_bucket
request_max_num_generation_tokens_sum prefix_cache_hits_total prefix_cache_queries_total
time_per_output_token_seconds_bucket gpu_prefix_cache_hits_total gpu_prefix_cache_queries_total"""


@pytest.fixture
async def rig(checkpoint):
    async with gateway(checkpoint, pair(period_s=0.01)) as rig:
        yield rig


async def samples(client: httpx.AsyncClient) -> dict[tuple[str, str], float]:
    """Name and, of what is told apart, by what -> value."""
    text = (await client.get("/metrics")).text
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    kinds = ("finished_reason", "stage", "code")
    return {(s.name, next((s.labels[kind] for kind in kinds if kind in s.labels), "")): s.value for s in found}


async def test_every_name_that_dashboards_ask_for_is_there(client, rig):
    await client.post("/v1/completions", json=ASK)
    named = {name for name, _ in await samples(client)}
    assert {f"vllm:{name}" for name in DASHBOARDS.split()} <= named
    text = (await client.get("/metrics")).text
    assert f'vllm:num_requests_running{{engine="0",model_name="{rig.front.model}"}} 0.0' in text


async def test_every_end_that_requests_come_to_is_there_before_the_first(client):
    """A count that begins with 1 is no increase to Prometheus."""
    text = (await client.get("/metrics")).text
    for code in ("ok", "invalid_request", "overloaded", "unavailable", "internal"):
        assert f'tandem_gateway_requests_total{{code="{code}"}} 0.0' in text


async def test_a_request_of_two_answers_is_counted_once_and_its_answers_twice(client, rig, monkeypatch):
    monkeypatch.setattr(rig.workers[0], "cached_tokens", 2)
    await client.post("/v1/completions", json=ASK | {"n": 2})
    got, prompt = await samples(client), len(rig.workers[0].jobs[0].token_ids)
    assert got["vllm:prompt_tokens_total", ""] == got["tandem_gateway_prompt_tokens_total", ""] == prompt
    assert got["vllm:generation_tokens_total", ""] == got["tandem_gateway_completion_tokens_total", ""] == 8
    assert got["vllm:prefix_cache_hits_total", ""] == 2
    assert got["vllm:request_success_total", "length"] == 2
    assert got["vllm:inter_token_latency_seconds_count", ""] == 6
    assert got["vllm:time_to_first_token_seconds_count", ""] == 1
    assert got["vllm:request_params_n_sum", ""] == 2


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
async def test_each_end_has_its_reason(client, rig, reason):
    ask = ASK | {"max_tokens": 400 if reason in ("abort", "error") else 4, "stop": " two" if reason == "stop" else None}
    if reason == "error":
        rig.workers[1].refuse = 503
    if reason == "abort":
        await rig.leave(client, ask, lambda: rig.workers[1].num_running)
    else:
        await client.post("/v1/completions", json=ask)
    await rig.until(lambda: rig.front.admission.num_taken == 0)
    got = await samples(client)
    ends = {why: value for (name, why), value in got.items() if name == "vllm:request_success_total"}
    assert ends == {why: float(why == reason) for why in ("stop", "length", "abort", "error")}


async def test_what_is_refused_before_it_has_a_place_is_no_work(client, rig):
    before = await samples(client)
    rig.store.overloaded = True
    assert (await client.post("/v1/completions", json=ASK)).status_code == 429
    after = await samples(client)
    changed = [name for name, reason in after if after[name, reason] != before.get((name, reason))]
    assert not [name for name in changed if name.startswith(("vllm:", "tandem_gateway_prompt", "tandem_gateway_e2e"))]
    assert "tandem_gateway_requests_total" in changed


async def test_a_prompt_that_no_worker_took_was_not_computed(client, rig):
    for worker in rig.workers:
        worker.refuse = 503
    assert (await client.post("/v1/completions", json=ASK)).status_code == 503
    got = await samples(client)
    assert got["tandem_gateway_prompt_tokens_total", ""] == got["vllm:prompt_tokens_total", ""] == 0
    assert got["vllm:prefix_cache_queries_total", ""] == 0
    assert got["tandem_gateway_e2e_seconds_count", ""] == got["vllm:e2e_request_latency_seconds_count", ""] == 1


async def test_those_that_run_are_told_from_those_that_wait(client, rig):
    async with client.stream("POST", "/v1/completions", json=ASK | {"max_tokens": 400, "stream": True}) as reply:
        lines = reply.aiter_lines()  # kept: one that is let go closes the answer
        await anext(lines)
        got = await samples(client)
        assert (got["vllm:num_requests_running", ""], got["vllm:num_requests_waiting", ""]) == (1, 0)
    await rig.until(rig.is_idle)


async def test_the_stages_that_workers_tell_are_counted_once_per_answer(client, rig):
    await client.post("/v1/completions", json=ASK | {"n": 2})
    text = (await client.get("/metrics")).text
    for stage in ("queue", "prefill", "expect", "land", "join", "decode"):
        assert f'tandem_gateway_stage_seconds_count{{stage="{stage}"}} 2.0' in text
    for stage in ("receive", "prepare", "place"):
        assert f'tandem_gateway_stage_seconds_count{{stage="{stage}"}} 1.0' in text
    assert "tandem_gateway_exposed_seconds_count 2.0" in text


async def test_an_answer_that_ends_here_has_its_stages_too(client, rig):
    """A stop string ends it, or its client leaves: no worker sends an end.

    The handoff was exposed all the same.
    """
    text = (await client.post("/v1/completions", json=ASK | {"max_tokens": 3})).json()["choices"][0]["text"]
    await client.post("/v1/completions", json=ASK | {"max_tokens": 400, "stop": [text[-2:]]})
    async with client.stream("POST", "/v1/completions", json=ASK | {"max_tokens": 400, "stream": True}) as reply:
        lines = reply.aiter_lines()
        for _ in range(8):
            await anext(lines)
    await rig.until(rig.is_idle)
    got = await samples(client)
    assert got["tandem_gateway_requests_total", "ok"] == 2
    for stage in ("queue", "prefill", "expect", "land", "join", "decode"):
        assert got["tandem_gateway_stage_seconds_count", stage] == 3
    assert got["tandem_gateway_exposed_seconds_count", ""] == 3


async def test_whose_decode_had_not_begun_has_no_decode(client, rig, monkeypatch):
    monkeypatch.setattr(rig.workers[1], "_answer", lambda job: asyncio.sleep(3600))
    async with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as reply:
        await anext(reply.aiter_lines())
    await rig.until(rig.is_idle)
    got = await samples(client)
    assert got["tandem_gateway_stage_seconds_count", "prefill"] == 1
    assert ("tandem_gateway_stage_seconds_count", "decode") not in got


async def test_a_slow_client_is_no_slow_answer(rig):
    """Its body comes in two parts."""
    body = json.dumps(ASK | {"max_tokens": 2}).encode()

    async def parts():
        yield body[:10]
        await asyncio.sleep(0.3)
        yield body[10:]

    async with rig.client() as client:
        reply = await client.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
        assert reply.status_code == 200
        got = await samples(client)
    assert got["tandem_gateway_stage_seconds_sum", "receive"] >= 0.3 > got["tandem_gateway_ttft_seconds_sum", ""]


def test_a_handoff_is_observed_from_token_0_on(rig):
    told = {"prefill_queue": 0.1, "prefill_prefill": 0.4, "expect": 0.2, "land": 0.5, "decode": 2.0}
    rig.front.metrics.account(told)
    text = rig.front.metrics.text().decode()
    assert 'tandem_gateway_exposed_seconds_bucket{le="0.1"} 0.0' in text
    assert 'tandem_gateway_exposed_seconds_bucket{le="0.25"} 1.0' in text
