"""/v1/embeddings by openai-python, against fake workers: each text has the embedding 3, 0, -4."""

import base64
import json
from array import array
from dataclasses import replace

import openai
import pytest

from checkpoint.checkpoint import EmbeddingForm
from testing import fake_worker
from tests.gateway.gateway_rig import gateway, pair


@pytest.fixture
async def client(rig):
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="x", max_retries=0) as client:
        yield client


async def test_texts_have_embeddings_of_length_one_in_their_order(rig, client):
    reply = await client.embeddings.create(model=rig.front.model, input=["one two", "three"])
    assert [item.index for item in reply.data] == [0, 1]
    assert [item.embedding for item in reply.data] == [pytest.approx([0.6, 0.0, -0.8])] * 2
    ids = [rig.front.prompting.tokenizer.encode(text).ids for text in ("one two", "three")]
    assert sorted(job.token_ids for job in rig.workers[0].jobs) == sorted(ids)
    assert {job.sampling.returns_embedding for job in rig.workers[0].jobs} == {True}
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (sum(map(len, ids)),) * 2
    await rig.until(rig.is_idle)


async def test_floats_base64_and_fewer_dimensions(rig):
    async with rig.client() as http:
        asked = {"input": [5, 6, 7], "dimensions": 1}
        floats, packed = [
            (await http.post("/v1/embeddings", json=asked | {"encoding_format": way})).json()["data"][0]["embedding"]
            for way in ("float", "base64")
        ]
        assert floats == array("f", base64.b64decode(packed)).tolist() == [1.0]
        assert rig.workers[0].jobs[0].token_ids == [5, 6, 7]
        await http.post("/v1/embeddings", json={"input": [[5], [6, 7]], "truncate_prompt_tokens": 1})
        assert [job.token_ids for job in rig.workers[0].jobs[2:]] == [[5], [7]]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "input"),
        ({"input": ""}, "input", "no tokens"),
        ({"input": []}, "input", "'input' must be 1 to"),
        ({"input": [[1], "a", 3.5]}, "input", "'input' must be a string"),
        ({"input": "a", "dimensions": 577}, "dimensions", "577; an embedding of this model has 576"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"input": "a " * 9000}, "input", "maximum context length"),
    ],
)
async def test_a_bad_field_is_named(rig, fields, param, words):
    async with rig.client() as http:
        reply = await http.post("/v1/embeddings", json=fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param) and words in error["message"]


async def test_a_model_says_how_its_embeddings_are_made(checkpoint, monkeypatch):
    plain = replace(checkpoint, embedding=EmbeddingForm(is_normalized=False))
    async with gateway(plain, pair()) as rig, rig.client() as http:
        reply = await http.post("/v1/embeddings", json={"input": "a"})
        assert reply.json()["data"][0]["embedding"] == [3.0, 0.0, -4.0]
        monkeypatch.setattr(fake_worker, "EMBEDDING", (float("nan"),))
        assert (await http.post("/v1/embeddings", json={"input": "a"})).status_code == 500
    other = replace(checkpoint, embedding=EmbeddingForm("it pools otherwise"))
    async with gateway(other, pair()) as rig, rig.client() as http:
        reply = await http.post("/v1/embeddings", json={"input": "a"})
        assert reply.status_code == 400 and "no embeddings here: it pools otherwise" in json.dumps(reply.json())
