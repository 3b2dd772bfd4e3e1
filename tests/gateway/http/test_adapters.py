"""LoRA adapters as clients see them: models of their own, on the workers that have loaded them."""

import pytest

from contracts.ids import WorkerId
from contracts.node import WorkerRole
from contracts.request import AdapterRef
from testing.fake_worker import FakeWorker
from tests.gateway.gateway_rig import SECRET, gateway, pair

SQL, LAW = AdapterRef("sql", b"/a/sql"), AdapterRef("law", b"/a/law")
RUNTIME = {"allow_runtime_lora_updating": True}
ASK = {"prompt": [5, 6], "max_tokens": 3, "temperature": 0}


def mixed(*adapters: tuple[AdapterRef, ...] | None, **options) -> list[FakeWorker]:
    roles = enumerate(adapters)
    return [FakeWorker(WorkerId(f"m{i}"), WorkerRole.MIXED, SECRET, adapters=each, **options) for i, each in roles]


async def test_adapters_are_models_of_their_own(checkpoint):
    workers = mixed((SQL,), (SQL,))
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in listed] == [(checkpoint.name, None), ("sql", checkpoint.name)]
        assert (await client.get("/v1/models/sql")).json() == listed[1]
        for path, body in (
            ("/v1/completions", ASK),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
            ("/v1/embeddings", {"input": "hi"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ):
            replies = [await client.post(path, json={"model": name, **body}) for name in ("sql", checkpoint.name)]
            assert [reply.json()["model"] for reply in replies] == ["sql", checkpoint.name], path
        assert [job.adapter for job in workers[0].jobs] == [SQL, None] * 5
        unknown = await client.post("/v1/completions", json={"model": "law", **ASK})
        assert unknown.status_code == 404 and "the model 'law' does not exist" in unknown.json()["error"]["message"]


async def test_an_adapter_is_placed_where_it_is_loaded(checkpoint):
    workers = mixed(None, (), (AdapterRef("sql", b"other"), LAW), (SQL, LAW), (SQL,))
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        for _ in range(2):
            assert (await client.post("/v1/completions", json={"model": "sql", **ASK})).status_code == 200
        assert [len(worker.jobs) for worker in workers] == [0, 0, 0, 2, 0], (
            "those of other weights are passed over, too"
        )


async def test_a_worker_that_has_lost_it_is_left_for_another(checkpoint):
    """Its refusal comes before the registry tells of it."""
    workers = mixed((SQL,), (SQL,))
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        rig.front.dispatch.workers.lacking = lambda adapter: []  # type: ignore[method-assign]
        workers[0].adapters = ()
        reply = await client.post("/v1/completions", json={"model": "sql", **ASK})
        assert reply.status_code == 200 and [len(worker.jobs) for worker in workers] == [1, 1]
        workers[1].adapters = ()
        gone = await client.post("/v1/completions", json={"model": "sql", **ASK})
        assert gone.status_code == 503 and "not loaded its adapter" in gone.json()["error"]["message"]


async def test_without_a_worker_an_adapter_is_no_unknown_model(checkpoint):
    workers = mixed((SQL,))
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        rig.store.workers = []
        await rig.until(lambda: not rig.front.dispatch.workers.loads)
        assert (await client.post("/v1/completions", json={"model": "sql", **ASK})).status_code == 503


async def test_adapters_are_loaded_and_unloaded_on_all_workers(checkpoint):
    workers = pair(adapters=())
    async with gateway(checkpoint, workers, **RUNTIME) as rig, rig.client() as client:
        loaded = await client.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "/a/sql"})
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert [worker.adapters for worker in workers] == [(SQL,)] * 2
        assert (await client.post("/v1/completions", json={"model": "sql", **ASK})).json()["model"] == "sql"
        unloaded = await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert [worker.adapters for worker in workers] == [()] * 2
        assert (await client.post("/v1/completions", json={"model": "sql", **ASK})).status_code == 404
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 404


async def test_what_one_worker_refuses_none_has(checkpoint):
    workers = pair(adapters=())
    workers[1].refused_adapter = "sql"
    async with gateway(checkpoint, workers, **RUNTIME) as rig, rig.client() as client:
        refused = await client.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "/a/sql"})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "worker d0: the adapter 'sql' is not served"
        assert [worker.adapters for worker in workers] == [()] * 2


@pytest.mark.parametrize(
    ("settings", "body", "status", "words"),
    [
        ({}, {"lora_name": "sql", "lora_path": "/a/sql"}, 404, "set TANDEM_ALLOW_RUNTIME_LORA_UPDATING"),
        (RUNTIME, {"lora_name": "sql"}, 400, "lora_path"),
        (RUNTIME, {"lora_name": "", "lora_path": "/a"}, 400, "lora_name"),
        (RUNTIME, {"lora_name": "NAME", "lora_path": "/a"}, 400, "is a name of the model itself"),
    ],
)
async def test_bad_requests_for_adapters(checkpoint, settings, body, status, words):
    body = {key: checkpoint.name if value == "NAME" else value for key, value in body.items()}
    async with gateway(checkpoint, pair(adapters=()), **settings) as rig, rig.client() as client:
        reply = await client.post("/v1/load_lora_adapter", json=body)
        assert reply.status_code == status and words in reply.json()["error"]["message"]


async def test_adapters_in_progress_are_shown_as_vllm_shows_them(checkpoint):
    workers = mixed((SQL, LAW), period_s=0.05)
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        assert "vllm:lora_requests_info{" in (await client.get("/metrics")).text
        body = {"model": "sql", "prompt": [5, 6], "max_tokens": 1000}
        await rig.leave(client, body, lambda: rig.front.dispatch.adapters_in_flight() == (["sql"], []))
        line = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""}'
        await rig.until(lambda: rig.front.dispatch.num_inflight == 0)
        assert line in (await client.get("/metrics")).text
