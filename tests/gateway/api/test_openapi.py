"""/openapi.json says what really comes: each reply has exactly the described shape, each error the shape of its API."""

import json
import os
from pathlib import Path

import msgspec

from gateway.api import openapi
from gateway.api.openapi import AnthropicErrorReply, ErrorReply

SNAPSHOT = Path(__file__).with_name("openapi.json")
SAY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ASK = {"prompt": "one two", "max_tokens": 3}
REPLIES = [
    ("POST", "/v1/chat/completions", SAY | {"n": 2}, openapi.ChatReply),
    ("POST", "/v1/chat/completions", SAY | {"logprobs": True, "top_logprobs": 2}, openapi.ChatReply),
    (
        "POST",
        "/v1/chat/completions",
        SAY | {"tools": [{"type": "function", "function": {"name": "f"}}]},
        openapi.ChatReply,
    ),
    ("POST", "/v1/completions", ASK | {"echo": True}, openapi.TextReply),
    ("POST", "/v1/chat/completions", SAY | {"prompt_logprobs": 1, "return_token_ids": True}, openapi.ChatReply),
    ("POST", "/v1/completions", ASK | {"logprobs": 1}, openapi.TextReply),
    ("POST", "/v1/completions", ASK | {"logprobs": 1, "echo": True, "max_tokens": 0}, openapi.TextReply),
    ("POST", "/v1/completions", ASK | {"prompt_logprobs": 1, "return_token_ids": True}, openapi.TextReply),
    ("POST", "/v1/responses", {"input": "hi", "max_output_tokens": 3}, openapi.ResponseReply),
    ("POST", "/v1/messages", SAY, openapi.MessagesReply),
    ("POST", "/v1/messages/count_tokens", SAY, openapi.CountTokensReply),
    ("POST", "/v1/chat/completions/render", SAY | {"n": 2, "stop": "a"}, openapi.RenderReply),
    ("POST", "/v1/completions/render", ASK | {"stream": True}, list[openapi.RenderReply]),
    ("POST", "/v1/embeddings", {"input": ["hi", "ho"]}, openapi.EmbeddingsReply),
    ("POST", "/v1/embeddings", {"input": "hi", "encoding_format": "base64"}, openapi.EmbeddingsReply),
    ("POST", "/v1/score", {"text_1": "hi", "text_2": "ho"}, openapi.ScoresReply),
    ("POST", "/v1/rerank", {"query": "hi", "documents": ["ho"]}, openapi.RerankReply),
    ("POST", "/tokenize", {"prompt": "hi"}, openapi.TokenizeReply),
    ("POST", "/tokenize", {"prompt": "hi", "return_token_strs": True}, openapi.TokenizeReply),
    ("POST", "/tokenize", SAY, openapi.TokenizeReply),
    ("POST", "/detokenize", {"tokens": [1, 2]}, openapi.DetokenizeReply),
    ("GET", "/v1/models", None, openapi.ModelList),
    ("GET", "/ready", None, openapi.ReadyReply),
    ("GET", "/version", None, openapi.VersionReply),
    ("GET", "/load", None, openapi.LoadReply),
]
MORE = {openapi.ResponseReply}
"""Replies that hold more than is described: fields that only echo the request."""


async def test_every_reply_has_the_shape_that_is_described(client):
    for method, path, body, kind in REPLIES:
        reply = await client.request(method, path, json=body)
        assert reply.status_code == 200, reply.text
        shaped = msgspec.convert(reply.json(), kind)
        assert kind in MORE or msgspec.to_builtins(shaped) == reply.json(), path


async def test_every_endpoint_describes_its_errors(client):
    described = (await client.get("/openapi.json")).json()["paths"]
    for path, operations in described.items():
        for operation in operations.values():
            schema = operation["responses"]["default"]["content"]["application/json"]["schema"]
            shape = AnthropicErrorReply if path.startswith("/v1/messages") else ErrorReply
            assert schema == openapi.schema_of(shape), path
            assert "422" not in operation["responses"]
    assert {path for _, path, _, _ in REPLIES} <= described.keys()


async def test_errors_of_every_kind_have_the_one_shape(client, rig):
    replies = [
        await client.post("/v1/completions", json={}),
        await client.post("/v1/completions", json=ASK | {"model": "x"}),
        await client.get("/v1/completions"),
        await client.get("/nowhere"),
        await client.get("/v1/models/x"),
    ]
    rig.store.overloaded = True
    replies.append(await client.post("/v1/completions", json=ASK))
    assert [reply.status_code for reply in replies] == [400, 404, 405, 404, 404, 429]
    for reply in replies:
        assert msgspec.to_builtins(msgspec.convert(reply.json(), ErrorReply)) == reply.json()


async def test_a_wrong_method_is_told_all_that_are_right(client):
    for path, methods in (("/ping", "GET, HEAD, POST"), ("/v1/completions", "POST"), ("/v1/models/x", "GET, HEAD")):
        reply = await client.request("OPTIONS", path)
        assert (reply.status_code, reply.headers["allow"]) == (405, methods)


async def test_head_is_get_without_a_body_and_not_described(client):
    for path in ("/health", "/ready", "/ping", "/v1/models", "/version", "/load", "/v1/models/x"):
        got, head = await client.get(path), await client.head(path)
        assert (head.status_code, head.content) == (got.status_code, b""), path
        assert head.headers["content-length"] == got.headers["content-length"]
    assert (await client.head("/v1/completions")).status_code == 405
    described = (await client.get("/openapi.json")).json()["paths"]
    assert {method for operations in described.values() for method in operations} == {"get", "post"}
    names = [operation["operationId"] for operations in described.values() for operation in operations.values()]
    assert len(names) == len({*names})


async def test_the_described_bodies_name_each_field(client):
    described = (await client.get("/openapi.json")).json()["paths"]["/v1/completions"]["post"]
    body = described["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["prompt"]
    assert body["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert "text/event-stream" in described["responses"]["200"]["content"]


async def test_the_document_is_the_one_that_is_written_down(client):
    """Whatever changes what clients may send or get shows in a diff of openapi.json.

    `TANDEM_WRITE_OPENAPI=1 make test ARGS=tests/gateway/api/test_openapi.py` writes it anew.
    """
    document = (await client.get("/openapi.json")).text
    text = json.dumps(json.loads(document), indent=1, ensure_ascii=False) + "\n"
    if "TANDEM_WRITE_OPENAPI" in os.environ:
        SNAPSHOT.write_text(text)
    assert SNAPSHOT.read_text() == text
