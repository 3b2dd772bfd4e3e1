"""What workers tell the registry, on the gateway's /metrics: together under vLLM's names, by worker under ours."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from contracts.ids import Incarnation, WorkerId
from contracts.layout import KVLayout
from contracts.node import STEP_TOKENS, NodeLoad
from gateway.observability.worker_metrics import SumOverWorkers
from tests.gateway.gateway_rig import gateway, pair
from tests.observability.prometheus import Prometheus, prometheus
from tests.observability.queries import Query
from tests.waiting import until

pytestmark = pytest.mark.slow

LAYOUT = KVLayout.uniform(model="m", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
STEPS = (1, 2, *[0] * (len(STEP_TOKENS) - 2), 4)
ASK = {"prompt": "one two three", "max_tokens": 4}


def loaded(free_tokens: int, **fields) -> NodeLoad:
    return NodeLoad(free_tokens=free_tokens, num_step_tokens=100, steps=STEPS, **fields)


@pytest.fixture
async def rig(checkpoint):
    prefill, decode = pair(layout=LAYOUT)
    prefill.load, decode.load = loaded(1 << 19, num_waiting=2), loaded(1 << 20, num_preemptions=3)
    async with gateway(checkpoint, [prefill, decode]) as rig:
        yield rig


async def series(client) -> dict[str, dict[tuple[str, ...], float]]:
    """Name -> values of labels but for the model and the engine -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            own = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            found.setdefault(sample.name, {})[tuple(value for _, value in sorted(own.items()))] = sample.value
    return found


async def test_the_pool_is_one_server_and_each_worker_is_told_apart(client):
    got = await series(client)
    assert got["vllm:kv_cache_usage_perc"] == {(): 0.25}
    assert got["vllm:num_preemptions_total"] == {(): 3}
    assert got["vllm:cache_config_info"] == {("16", "True", str(1 << 21), str((1 << 21) // 16)): 1}
    assert got["vllm:iteration_tokens_total_count"] == {(): 14} and got["vllm:iteration_tokens_total_sum"] == {(): 200}
    bounds = got["vllm:iteration_tokens_total_bucket"]
    assert (bounds["1.0",], bounds["8.0",], bounds["16384.0",], bounds["+Inf",]) == (2, 6, 6, 14)
    assert got["tandem_gateway_worker_kv_cache_usage"] == {("prefill", "p0"): 0.5, ("decode", "d0"): 0.0}
    assert got["tandem_gateway_worker_preemptions_total"] == {("prefill", "p0"): 0, ("decode", "d0"): 3}
    assert got["tandem_gateway_worker_waiting"] == {("prefill", "p0"): 2, ("decode", "d0"): 0}
    assert (await series(client))["vllm:iteration_tokens_total_count"] == {(): 14}, "a look counts nothing twice"


async def test_where_prompts_came_from_and_what_they_wait_for(client, rig, monkeypatch):
    monkeypatch.setattr(rig.workers[0], "cached_tokens", 2)
    assert (await client.post("/v1/completions", json=ASK)).status_code == 200
    got, prompt = await series(client), len(rig.workers[0].jobs[0].token_ids)
    sources = {("local_compute",): prompt - 2, ("local_cache_hit",): 2, ("external_kv_transfer",): prompt}
    assert got["vllm:prompt_tokens_by_source_total"] == sources
    assert got["vllm:num_requests_waiting_by_reason"] == {("capacity",): 0, ("deferred",): 0}
    monkeypatch.setattr(rig.workers[0], "_answer", lambda job: asyncio.sleep(3600))
    asking = [asyncio.create_task(client.post("/v1/completions", json=ASK)) for _ in range(3)]
    await rig.until(lambda: rig.front.dispatch.num_inflight == 3)
    assert (await series(client))["vllm:num_requests_waiting_by_reason"] == {("capacity",): 2, ("deferred",): 1}
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_requests_are_counted_by_endpoint_and_status(client):
    await client.post("/v1/completions", json=ASK)
    await client.post("/v1/completions", json=ASK | {"stream": True})
    await client.post("/v1/completions", json={})
    await client.get("/v1/models/x")
    await client.request("PURGE", "/a/b")
    await client.get("/health")
    assert (await series(client))["http_requests_total"] == {
        ("/v1/completions", "POST", "2xx"): 2,
        ("/v1/completions", "POST", "4xx"): 1,
        ("/v1/models/{model:path}", "GET", "4xx"): 1,
        ("none", "other", "4xx"): 1,
    }


OVERVIEW = {
    "kv cache": "vllm:kv_cache_usage_perc * 100",
    "preemptions": "sum(rate(vllm:num_preemptions_total[10s]))",
    "requests": "sum by (status) (rate(http_requests_total[10s]))",
    "sources": "sum by (source) (rate(vllm:prompt_tokens_by_source_total[10s]))",
    "step": "histogram_quantile(0.5, sum by (le) (vllm:iteration_tokens_total_bucket))",
    "reasons": "sum by (reason) (vllm:num_requests_waiting_by_reason)",
    "blocks": "sum by (num_gpu_blocks, block_size) (vllm:cache_config_info)",
    "slow": 'vllm:e2e_request_latency_seconds_bucket{le="30.0"} - ignoring(le)'
    ' vllm:e2e_request_latency_seconds_bucket{le="0.3"}',
    "gaps": 'vllm:inter_token_latency_seconds_bucket{le="0.05"} + ignoring(le)'
    ' vllm:inter_token_latency_seconds_bucket{le="0.2"}',
}
"""The panels of vLLM's overview and rules on its buckets, as Prometheus is asked for them."""


async def test_a_real_prometheus_answers_what_vllm_s_dashboards_ask(rig, client, tmp_path):
    pytest.importorskip("yaml")
    await client.post("/v1/completions", json=ASK)
    await asyncio.to_thread(_asked, rig.url, tmp_path)


def _asked(url: str, folder: Path) -> None:
    urls = {"gateway": [url], "prefill": [], "decode": [], "coordinator": []}
    with prometheus(urls, folder) as found:
        for name, expr in OVERVIEW.items():
            until(lambda expr=expr: _values(found, expr), 90.0, lambda name=name: f"{name} stays empty", period_s=0.5)


def _values(found: Prometheus, expr: str) -> list[float]:
    return found.values(Query("panel", expr))


counts = st.lists(st.integers(0, 50), min_size=2, max_size=2)


@given(st.lists(st.tuples(st.sampled_from("abc"), counts), max_size=30))
def test_a_sum_never_falls_and_has_each_count_once(growths):
    """Processes that grow, leave and come back, in any order."""
    total, now = SumOverWorkers(2), {}
    for name, more in growths:
        now[name] = tuple(had + new for had, new in zip(now.get(name, (0, 0)), more, strict=True))
        before = list(total.totals)
        total.add((WorkerId("w"), Incarnation(name)), now[name])
        assert all(new >= old for new, old in zip(total.totals, before, strict=True))
    assert total.totals == [sum(counted[at] for counted in now.values()) for at in range(2)]
