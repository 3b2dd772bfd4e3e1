"""Tenants at the gateway's door: their keys, limits, priority and part, with fake workers."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.tenants.tenant_watch import watch_tenants
from tests.gateway.gateway_rig import gateway, pair

pytestmark = pytest.mark.slow

ASK = {"prompt": [5] * 10, "max_tokens": 4, "ignore_eos": True}
TENANTS = """
[tenants.free]
keys = ["f"]
[tenants.few]
keys = ["r"]
requests_per_minute = 2
[tenants.small]
keys = ["t"]
tokens_per_minute = 40
[tenants.narrow]
keys = ["n"]
max_inflight = 1
[tenants.late]
keys = ["l"]
priority = 7
weight = 0.5
"""


@asynccontextmanager
async def limited(checkpoint, tmp_path: Path, workers=None, text: str = TENANTS, **settings):
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    async with gateway(checkpoint, workers or pair(), tenants=file, **settings) as rig, rig.client() as http:
        yield rig, http, file


async def ask(http, key: str, **fields):
    return await http.post("/v1/completions", json=ASK | fields, headers={"authorization": f"Bearer {key}"})


def sample(text: str, name: str, **labels: str) -> float:
    wanted = name + "{" + ",".join(f'{label}="{value}"' for label, value in sorted(labels.items())) + "} "
    return float(next(line for line in text.splitlines() if line.startswith(wanted)).split()[-1])


async def test_each_limit_refuses_by_name_and_says_when_to_come_again(checkpoint, tmp_path):
    async with limited(checkpoint, tmp_path, api_key="old") as (rig, http, _):
        assert (await ask(http, "nobody")).status_code == 401
        assert (await ask(http, "old")).status_code == 200
        assert [(await ask(http, "r")).status_code for _ in range(3)] == [200, 200, 429]
        refused = await ask(http, "r")
        assert "'few' has used up its requests_per_minute (2)" in refused.json()["error"]["message"]
        assert 25 <= int(refused.headers["retry-after"]) <= 30
        assert [(await ask(http, "t")).status_code for _ in range(3)] == [200, 200, 200]  # 14 tokens each
        refused = await ask(http, "t")  # 10 wanted, 2 owed
        assert "tokens_per_minute (40)" in refused.json()["error"]["message"]
        assert 15 <= int(refused.headers["retry-after"]) <= 18
        assert (await ask(http, "f", n=3)).status_code == 200
        text = (await http.get("/metrics")).text
        requests = "tandem_gateway_tenant_requests_total"
        assert sample(text, requests, tenant="few", outcome="taken") == 2
        assert sample(text, requests, tenant="few", outcome="refused_requests_per_minute") == 2
        tokens = "tandem_gateway_tenant_tokens_total"
        assert [sample(text, tokens, tenant="free", kind=kind) for kind in ("prompt", "completion")] == [10, 12]
        assert sample(text, "tandem_gateway_tenant_inflight", tenant="free") == 0
        assert rig.front.admission.num_taken == 0


async def test_answers_at_once_are_limited_and_end_with_their_client(checkpoint, tmp_path):
    async with limited(checkpoint, tmp_path, pair(period_s=0.02)) as (rig, http, _):
        running = asyncio.create_task(ask(http, "n", max_tokens=500))
        await rig.until(lambda: rig.front.admission.num_taken == 1)
        refused = await ask(http, "n")
        assert (refused.status_code, "of at most 1" in refused.text) == (429, True)
        never = await ask(http, "n", n=2)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        assert (await ask(http, "f")).status_code == 200
        running.cancel()
        await rig.until(lambda: rig.front.admission.num_taken == 0)
        assert (await ask(http, "n")).status_code == 200


async def test_one_tenant_leaves_others_room(checkpoint, tmp_path):
    async with limited(checkpoint, tmp_path, pair(period_s=0.05), max_inflight=16) as (rig, http, _):
        flood = [asyncio.create_task(ask(http, "f", max_tokens=400)) for _ in range(40)]
        await rig.until(lambda: sum(task.done() for task in flood) == 32)
        assert {task.result().status_code for task in flood if task.done()} == {429}
        assert rig.front.admission.num_taken == 8  # half of 16
        batch = await ask(http, "l", prompt=[[5]] * 9)
        assert (batch.status_code, batch.json()["error"]["param"]) == (400, "n")  # more than it may ever have
        assert rig.store.rooms == [1.0] + [0.5] * 7  # of the queues
        others = [asyncio.create_task(ask(http, "l", max_tokens=400)) for _ in range(10)]
        await rig.until(lambda: sum(task.done() for task in others) == 8)
        assert rig.front.admission.num_taken == 10  # a quarter of what was left, for its weight
        assert (await ask(http, "n")).status_code == 200 and rig.store.rooms[-1] == 1.0
        for task in (*flood, *others):
            task.cancel()
        await rig.until(rig.is_idle)


async def test_a_tenants_requests_are_no_more_urgent_than_it_is(checkpoint, tmp_path):
    async with limited(checkpoint, tmp_path) as (rig, http, _):
        for key, wish in (("l", {}), ("l", {"priority": -5}), ("l", {"priority": 9}), ("f", {"priority": -5})):
            assert (await ask(http, key, **wish)).status_code == 200
        jobs = rig.workers[0].jobs
        assert [(job.priority, job.tenant, job.weight) for job in jobs] == [
            (7, "late", 0.5), (7, "late", 0.5), (9, "late", 0.5), (0, "free", 1.0),
        ]  # fmt: skip


async def test_a_request_that_found_no_worker_costs_nothing(checkpoint, tmp_path):
    text = "[tenants.a]\nkeys = ['a']\nrequests_per_minute = 1\n"
    async with limited(checkpoint, tmp_path, pair(), text) as (rig, http, _):
        roles, rig.store.nodes = rig.store.nodes, None
        rig.store.place, place = _full, rig.store.place
        assert (await ask(http, "a")).status_code == 429
        rig.store.place, rig.store.nodes = place, roles
        assert [(await ask(http, "a")).status_code for _ in range(2)] == [200, 429]


async def _full(*_, **__):
    from contracts.errors import Overloaded

    raise Overloaded("all prefill workers are full")


async def test_answers_that_were_begun_are_paid_though_others_of_their_request_were_not(checkpoint, tmp_path):
    text = "[tenants.a]\nkeys = ['a']\nrequests_per_minute = 1\n"
    async with limited(checkpoint, tmp_path, pair(period_s=0.02), text) as (rig, http, _):
        place, second, over = rig.store.place, asyncio.Event(), asyncio.Event()

        async def slow(*args, **facts):
            if rig.store.placed:
                second.set()
                await over.wait()
            return await place(*args, **facts)

        rig.store.place = slow
        asked = asyncio.create_task(ask(http, "a", n=2, max_tokens=100))
        await asyncio.wait_for(second.wait(), 20)
        asked.cancel()
        await rig.until(lambda: rig.front.admission.num_taken == 0)
        over.set()
        rig.store.place = place
        assert (await ask(http, "a")).status_code == 429


async def test_what_is_all_tenants_is_the_operators_alone(checkpoint, tmp_path):
    async with limited(checkpoint, tmp_path, api_key="mine") as (_, http, _):
        for path in ("/console/state", "/v1/load_lora_adapter"):
            refused = await http.get(path, headers={"x-api-key": "f"})
            assert (refused.status_code, "needs a key of TANDEM_API_KEY" in refused.text) == (401, True)
            assert (await http.get(path, headers={"x-api-key": "mine"})).status_code != 401


async def test_a_file_that_changes_holds_at_once_unless_it_is_wrong(checkpoint, tmp_path, caplog):
    async with limited(checkpoint, tmp_path) as (rig, http, file):
        watching = asyncio.create_task(watch_tenants(file, rig.front.tenants, period_s=0.01))
        assert [(await ask(http, "r")).status_code for _ in range(3)] == [200, 200, 429]
        file.write_text("[tenants.few]\nkeys = ['r', 'new']\nrequests_per_minute = 3\n")
        await rig.until(lambda: rig.front.tenants.of_key("new") is not None)
        assert [(await ask(http, key)).status_code for key in ("new", "r", "f")] == [200, 429, 401]  # two were taken
        file.write_text("[tenants.few]\nkeys = ['r']\nrequests = 3\n")
        await rig.until(lambda: "unknown field `requests`; the tenants of before hold" in caplog.text)
        assert (await ask(http, "new")).status_code == 429
        file.write_text("")
        await rig.until(lambda: "names no tenant" in caplog.text)
        file.write_text("[tenants.other]\nkeys = ['o']\n")
        await rig.until(lambda: rig.front.tenants.of_key("o") is not None)
        file.write_text("[tenants.few]\nkeys = ['r']\nrequests_per_minute = 3\n")
        await rig.until(lambda: rig.front.tenants.of_key("r") is not None)
        assert (await ask(http, "r")).status_code == 429  # what was taken stays taken
        watching.cancel()
