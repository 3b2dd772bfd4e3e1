"""What an operator sets in place of what a model's files say."""

import json
from typing import Any

import pytest

from checkpoint import Advice
from contracts.errors import ConfigError
from gateway.http.app import make_app
from gateway.model_overrides import overridden
from gateway.settings import GatewaySettings
from tests.gateway.gateway_rig import gateway, pair


def configured(**fields: Any) -> GatewaySettings:
    return GatewaySettings(**fields)


SAY = [{"role": "user", "content": "hi"}]


def test_a_template_comes_from_a_file_or_is_given_itself(checkpoint, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}!", encoding="utf-8")
    assert overridden(checkpoint, configured()).chat_template == checkpoint.chat_template
    for given, text in ((str(file), "{{ messages[0].content }}!"), ("{{ 'x' }}", "{{ 'x' }}")):
        own = overridden(checkpoint, configured(chat_template=given))
        assert (own.chat_template, own.tool_template) == (text, None)
    with pytest.raises(ConfigError, match="chat_template is '/no/such/file'"):
        overridden(checkpoint, configured(chat_template="/no/such/file"))


def test_advice_is_the_model_s_or_none_or_another_folder_s_and_single_values_go_before_it(checkpoint, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 9, "do_sample": True}))
    model = Advice(temperature=0.6, top_p=0.9)
    checkpoint = overridden(checkpoint, configured(override_generation_config={"temperature": 0.6, "top_p": 0.9}))
    assert checkpoint.advice == model
    for fields, wanted in (
        ({}, model),
        ({"generation_config": "vllm"}, Advice()),
        ({"generation_config": str(tmp_path)}, Advice(temperature=0.5, top_k=9)),
        ({"override_generation_config": {"top_p": 0.8}}, Advice(temperature=0.6, top_p=0.8)),
        ({"generation_config": "vllm", "override_generation_config": {"top_k": 3}}, Advice(top_k=3)),
    ):
        assert overridden(checkpoint, configured(**fields)).advice == wanted, fields


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"override_generation_config": {"max_new_tokens": 5}}, "has 'max_new_tokens'; it may have temperature"),
        ({"override_generation_config": {"top_p": 2}}, "override_generation_config: top_p is 2"),
        ({"generation_config": "/no/such/folder"}, "generation_config.json there can't be read"),
    ],
)
def test_what_can_not_be_is_named(checkpoint, fields, words):
    with pytest.raises(ConfigError, match=words):
        overridden(checkpoint, configured(**fields))


async def test_every_template_has_the_default_names_and_a_request_s_go_before_them(checkpoint):
    settings = configured(chat_template="{{ mark }}{{ other }}{{ messages[0].content }}")
    defaults = {"mark": "one", "other": "two"}
    own = overridden(checkpoint, settings)
    async with gateway(own, pair(), default_chat_template_kwargs=defaults) as rig, rig.client() as client:
        for given, text in (({}, "onetwohi"), ({"chat_template_kwargs": {"mark": "1"}}, "1twohi")):
            for path, body in (
                ("/v1/chat/completions", {"messages": SAY, "max_tokens": 1}),
                ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
            ):
                rig.workers[0].jobs.clear()
                assert (await client.post(path, json=body | given)).status_code == 200
                assert rig.front.prompting.tokenizer.decode(rig.workers[0].jobs[0].token_ids) == text
            told = (await client.post("/tokenize", json={"messages": SAY} | given)).json()["tokens"]
            assert rig.front.prompting.tokenizer.decode(told) == text


async def test_several_names_mean_the_one_model(checkpoint):
    assert configured(served_model_name=" a, b,,").model_names == ["a", "b"]
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        rig.front.aliases = ("b", "org/c")
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == [rig.front.model, "b", "org/c"]
        assert (await client.get("/v1/models/org/c")).json()["id"] == "org/c"
        reply = await client.post("/v1/completions", json={"model": "b", "prompt": "hi", "max_tokens": 1})
        assert (reply.status_code, reply.json()["model"]) == (200, rig.front.model)


async def test_documents_are_under_the_proxy_s_path(checkpoint):
    async with gateway(checkpoint, pair(), root_path="/llm") as rig, rig.client() as client:
        assert '"/llm/openapi.json"' in (await client.get("/docs")).text.replace("'", '"')
        for path in ("/version", "/llm/version"):
            assert (await client.get(path)).status_code == 200
        assert make_app(rig.front).openapi()["paths"].keys() >= {"/v1/chat/completions"}
