"""What bad input gets: an error in OpenAI's shape that names the field; then the next good request is served."""

import gzip
import json
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from contracts.errors import ConfigError, RequestError
from gateway.api.openai.schema import DetokenizeRequest, ResponsesRequest, parse
from gateway.prompting.chat_template import Prompting
from gateway.prompting.request_fields import ChatRequest, CompletionRequest
from tests.gateway.gateway_rig import gateway, pair

pytestmark = pytest.mark.slow

SAY = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LEAST_INTEGER = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}
TYPES = {400: "BadRequestError", 404: "NotFoundError", 405: "BadRequestError", 413: "BadRequestError"}


def chat(**fields: Any) -> tuple[str, bytes]:
    return CHAT, json.dumps({"messages": SAY, "max_tokens": 2} | fields).encode()


def text(**fields: Any) -> tuple[str, bytes]:
    return TEXT, json.dumps({"prompt": "hi", "max_tokens": 2} | fields).encode()


def say(**message: Any) -> tuple[str, bytes]:
    return chat(messages=[{"role": "user", "content": "hi"} | message])


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


def allowed(*tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": list(tools)}}


NOW = {"type": "function", "function": {"name": "now"}}
NOT_JSON = [b"", b"{", b"null", b"[]", b'"a"', b"{'prompt': 'a'}", b"\x00" * 10, b"\xff\xfe", b'{"prompt": "\xc3\x28"}']
NOT_JSON += [b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}', b"[" * 100_000]
NOT_JSON += [b'{"a":' * 50_000, b'{"prompt": "\\ud83d"}', b'{"prompt": ["\\ude00"]}', b'{"prompt": "a"} {}', b"<xml/>"]

NAMED: list[tuple[tuple[str, bytes], str | None]] = [
    # wrong types
    (text(prompt=7), "prompt"),
    (text(prompt=None), "prompt"),
    (text(prompt=[]), "prompt"),
    (text(prompt=[[]]), "prompt"),
    (text(prompt=["a", 1]), "prompt"),
    (text(prompt=[1, "a"]), "prompt"),
    (text(prompt=[True]), "prompt"),
    (text(prompt=[1.5]), "prompt"),
    (text(prompt={"text": "a"}), "prompt"),
    (text(prompt=[["a"]]), "prompt"),
    (text(prompt=["a"] * 300), "prompt"),
    (text(prompt=deep(200)), "prompt"),
    (text(stream="yes"), "stream"),
    (text(temperature="hot"), "temperature"),
    (text(temperature=True), "temperature"),
    (text(max_tokens="many"), "max_tokens"),
    (text(max_tokens=1.5), "max_tokens"),
    (text(max_tokens="2.5"), "max_tokens"),
    (text(max_tokens="0"), "max_tokens"),
    (text(temperature="3"), "temperature"),
    (text(temperature="nan"), "temperature"),
    (text(logit_bias={"5": "nan"}), "logit_bias.5"),
    (text(logit_bias={"5": "-inf"}), "logit_bias.5"),
    (text(seed=1e300), "seed"),
    (text(prompt=[1e300]), "prompt"),
    (text(stop_token_ids=[3.0, 3.5]), "stop_token_ids[1]"),
    (text(logit_bias=[1]), "logit_bias"),
    (text(stream=True, stream_options=[]), "stream_options"),
    (text(stream=True, stream_options={"include_usage": "yes"}), "stream_options.include_usage"),
    (text(echo=2), "echo"),
    (text(model=5), "model"),
    (chat(logprobs=3), "logprobs"),
    # numbers that no float holds
    ((TEXT, b'{"prompt": "hi", "temperature": 1e999}'), "temperature"),
    ((TEXT, b'{"prompt": "hi", "logit_bias": {"5": -1e400}}'), "logit_bias.5"),
    ((CHAT, b'{"messages": [{"role": "user", "content": 1e999}]}'), "messages[0].content"),
    ((TEXT, b'{"prompt": [1, ' + b"9" * 5000 + b"]}"), "prompt[1]"),
    ((TEXT, b'{"prompt": ' + b"[" * 100_000 + b"1e999"), None),
    ((TEXT, b"-1e999"), None),
    # out of range
    (text(temperature=-0.1), "temperature"),
    (text(temperature=1e308), "temperature"),
    (text(top_p=0), "top_p"),
    (text(top_p=1.1), "top_p"),
    (text(top_k=-2), "top_k"),
    (text(min_p=-1), "min_p"),
    (text(presence_penalty=3), "presence_penalty"),
    (text(frequency_penalty=-3), "frequency_penalty"),
    (text(repetition_penalty=0), "repetition_penalty"),
    (text(n=0), "n"),
    (text(n=-1), "n"),
    (text(n=1025), "n"),
    (text(n=10**30), "n"),
    (text(max_tokens=0), "max_tokens"),
    (text(max_tokens=-5), "max_tokens"),
    (text(max_tokens=10**18), "max_tokens"),
    (text(min_tokens=-1), "min_tokens"),
    (text(min_tokens=3), "min_tokens"),
    (text(seed=2**64), "seed"),
    (text(logprobs=21), "logprobs"),
    (text(logprobs=-1), "logprobs"),
    (text(stop=["a"] * 17), "stop"),
    (text(stop="a" * 1025), "stop"),
    (text(stop=["a" * 1025]), "stop[0]"),
    (text(stop=[1]), "stop[0]"),
    (chat(top_logprobs=21, logprobs=True), "top_logprobs"),
    (chat(top_logprobs=1), "top_logprobs"),
    (chat(logprob_token_ids=[1]), "logprob_token_ids"),
    (text(logprob_token_ids=[1]), "logprob_token_ids"),
    (chat(logprob_token_ids=[1] * 129, logprobs=True), "logprob_token_ids"),
    (text(logprob_token_ids=[1 << 30], logprobs=0), "logprob_token_ids"),
    (chat(max_completion_tokens=0), "max_completion_tokens"),
    # token ids outside of the vocabulary
    (text(prompt=[49152]), "prompt"),
    (text(prompt=[-1]), "prompt"),
    (text(prompt=[2**70]), "prompt"),
    (text(stop_token_ids=[49152]), "stop_token_ids"),
    (text(stop_token_ids=[-1]), "stop_token_ids[0]"),
    (text(stop_token_ids=list(range(300))), "stop_token_ids"),
    (text(logit_bias={"49152": 1}), "logit_bias"),
    (text(logit_bias={"-1": 1}), "logit_bias"),
    (text(logit_bias={"\u0661": 1}), "logit_bias"),
    (text(logit_bias={"cat": 1}), "logit_bias"),
    (text(logit_bias={"5": 100, "6": "x"}), "logit_bias.6"),
    (text(logit_bias={"7" * 100: None}), "logit_bias." + "7" * 64),
    # what does not go together
    (text(stream_options={"include_usage": True}), "stream_options"),
    (text(max_tokens=0), "max_tokens"),
    (text(max_tokens=0, echo=False), "max_tokens"),
    (text(max_tokens=-1, echo=True), "max_tokens"),
    (text(prompt_logprobs=-1), "prompt_logprobs"),
    (text(prompt_logprobs=21), "prompt_logprobs"),
    (text(prompt_logprobs=0, stream=True), "prompt_logprobs"),
    (text(priority=2**63), "priority"),
    (text(priority=-(2**63) - 1), "priority"),
    (text(priority=0.5), "priority"),
    (text(cache_salt=""), "cache_salt"),
    (text(return_token_ids="yes"), "return_token_ids"),
    (text(suffix="end"), "suffix"),
    (chat(tools=[{"type": "function"}]), "tools[0].function"),
    (chat(response_format={"type": "yaml"}), "response_format.type"),
    (chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "what"}}}),
        "response_format.json_schema.schema",
    ),
    (text(structured_outputs={"regex": "(a"}), "structured_outputs.regex"),
    (text(structured_outputs={"json": {"type": "integer", "multipleOf": 99991, "minimum": 3}}), "structured_outputs"),
    # These end a process that reads them.
    (text(structured_outputs={"json": LEAST_INTEGER}), "structured_outputs.json"),
    (text(structured_outputs={"grammar": f"start: %json {json.dumps(LEAST_INTEGER)}"}), "structured_outputs.grammar"),
    (
        chat(
            tools=[
                {"type": "function", "function": {"name": "go", "parameters": {"properties": {"a": LEAST_INTEGER}}}}
            ],
            tool_choice="required",
        ),
        "tools[0].function.parameters",
    ),
    (text(prompt=[[]]), "prompt"),
    (text(prompt="hi " * 2_500_000), "prompt"),
    (chat(messages=[{"role": "user", "content": "hi " * 2_500_000}]), "messages"),
    (text(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
    (text(structured_outputs={"regex": "a", "choice": ["b"]}), "structured_outputs"),
    (text(structured_outputs={"color": "red"}), "structured_outputs"),
    (text(allowed_token_ids=[1 << 30]), "allowed_token_ids"),
    (text(bad_words=[""]), "bad_words[0]"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(tools=[NOW], tool_choice={"type": "function"}), "tool_choice.function"),
    (chat(tools=[NOW], tool_choice={"type": "allowed_tools"}), "tool_choice.allowed_tools"),
    (chat(tools=[NOW], tool_choice=allowed({"name": "x"})), "tool_choice.allowed_tools.tools"),
    (chat(tools=[NOW], tool_choice=allowed({})), "tool_choice.allowed_tools.tools[0]"),
    # conversations
    ((CHAT, b'{"max_tokens": 2}'), "messages"),
    (chat(messages=[]), "messages"),
    (chat(messages="hi"), "messages"),
    (chat(messages=[[]]), "messages[0]"),
    (chat(messages=[{}]), "messages[0].role"),
    (say(role="king"), "messages[0].role"),
    (say(role=None), "messages[0].role"),
    (say(role="assistant", function_call={"name": "f", "arguments": "{}"}), "messages[0].function_call"),
    (say(content=None), "messages[0].content"),
    (say(content=5), "messages[0].content"),
    (say(content=["a"]), "messages[0].content[0]"),
    (say(content=[{}]), "messages[0].content[0]"),
    (say(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (say(content=[{"type": "refusal", "text": "no"}]), "messages[0].content[0].refusal"),
    (say(content=[{"type": "image_url"}]), "messages[0].content[0]"),
    (say(content=[{"type": "text", "text": deep(50)}]), "messages[0].content[0].text"),
    (say(content=[{"type": "image_url", "image_url": {"url": "data:"}}]), "messages[0].content[0]"),
    (say(content=[{"type": "input_audio"}]), "messages[0].content[0]"),
    (say(role="assistant", tool_calls=[{"id": "a"}]), "messages[0].tool_calls[0].function"),
    # other endpoints
    (("/tokenize", b"{}"), "prompt"),
    (("/tokenize", b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}'), "prompt"),
    (("/tokenize", b'{"prompt": 3}'), "prompt"),
    (("/detokenize", b"{}"), "tokens"),
    (("/detokenize", b'{"tokens": "a"}'), "tokens"),
    (("/detokenize", b'{"tokens": [99999]}'), "tokens"),
    (("/detokenize", b'{"tokens": [-1]}'), "tokens[0]"),
]


ROLES = "'system', 'developer', 'user', 'assistant', 'tool'"
TEXT_FORMATS = "'text', 'json_object', 'json_schema'"
FORMATS = f"{TEXT_FORMATS}, 'structural_tag'"
CHOICES = "'none', 'auto', 'required', an object"
NAMED_CHOICES = "'function', 'custom', 'allowed_tools'"
TOLD: list[tuple[type[msgspec.Struct], dict[str, Any], str]] = [
    (ChatRequest, {"tool_choice": "sometimes"}, f"tool_choice: * 'sometimes'; allowed: {CHOICES}"),
    (ChatRequest, {"response_format": {"type": "xml"}}, f"response_format.type: * 'xml'; allowed: {FORMATS}"),
    (ChatRequest, {"messages": [*SAY, {"role": "alien"}]}, f"messages[1].role: * 'alien'; allowed: {ROLES}"),
    (
        ChatRequest,
        {"tools": [{"type": "web_search"}]},
        "tools[0].type: Invalid value 'web_search'; allowed: 'function', 'custom'",
    ),
    (
        ChatRequest,
        {"tool_choice": "missing required field"},
        f"tool_choice: * 'missing required field'; allowed: {CHOICES}",
    ),
    (ChatRequest, {"tool_choice": "a - at `$.n`"}, f"tool_choice: * 'a - at `$.n`'; allowed: {CHOICES}"),
    (ChatRequest, {"tool_choice": "matching regex"}, f"tool_choice: * 'matching regex'; allowed: {CHOICES}"),
    (ChatRequest, {"truncation_side": "up"}, "truncation_side: * 'up'; allowed: 'left', 'right'"),
    (ChatRequest, {"logit_bias": {"4": 7, "5": "x"}}, "logit_bias.5: Expected `float`, got `str`"),
    (
        ChatRequest,
        {"tools": [{"type": "function", "function": {"name": "mcp.tool"}}]},
        "tools[0].function.name: Expected letters, digits, _ and -, 1 to 64 of them",
    ),
    (ChatRequest, {"request_id": "a b"}, "request_id: Expected letters, digits, . _ : and -, 1 to 128 of them"),
    (ResponsesRequest, {"text": {"format": {"type": "xml"}}}, f"text.format.type: * 'xml'; allowed: {TEXT_FORMATS}"),
    (ResponsesRequest, {"tool_choice": {"type": "mcp"}}, f"tool_choice.type: * 'mcp'; allowed: {NAMED_CHOICES}"),
]
"""What is told of a field; * stands for msgspec's own words."""


@pytest.mark.parametrize(("kind", "fields", "words"), TOLD)
def test_a_refusal_says_what_is_allowed(kind, fields, words):
    with pytest.raises(RequestError) as refused:
        parse(json.dumps({"messages": SAY, "input": "hi"} | fields).encode(), kind)
    assert str(refused.value) == words.replace("*", "Invalid enum value")


@pytest.mark.parametrize(
    ("kind", "field", "given", "read"),
    [
        (ChatRequest, "max_completion_tokens", 1.0, 1),
        (ChatRequest, "seed", -1e18, -(10**18)),
        (CompletionRequest, "logprobs", -0.0, 0),
        (CompletionRequest, "stop_token_ids", [3.0, 4], [3, 4]),
        (ResponsesRequest, "max_output_tokens", 2e1, 20),
        (DetokenizeRequest, "tokens", [5.0], [5]),
        (ChatRequest, "temperature", 1.0, 1.0),
        (ChatRequest, "chat_template_kwargs", {"size": 1.0}, {"size": 1.0}),
    ],
)
def test_a_whole_number_may_have_a_point(kind, field, given, read):
    needed = {ChatRequest: {"messages": SAY}, CompletionRequest: {"prompt": "hi"}, ResponsesRequest: {"input": "hi"}}
    body = needed.get(kind, {}) | {field: given}
    found = getattr(parse(json.dumps(body).encode(), kind), field)
    assert repr(found) == repr(read)


def test_numbers_and_booleans_may_be_in_quotes():
    quoted = {"max_tokens": "5", "temperature": "0.5", "stream": "true", "n": "2.0", "logit_bias": {"5": "-1e2"}}
    asked = parse(json.dumps({"messages": SAY, "stop": "5", "cache_salt": "null"} | quoted).encode(), ChatRequest)
    told = (asked.max_tokens, asked.temperature, asked.stream, asked.n, asked.logit_bias, asked.stop, asked.cache_salt)
    assert told == (5, 0.5, True, 2, {"5": -100.0}, "5", "null")


async def test_a_bias_beyond_100_counts_as_100_and_more_than_128_answers_are_made(checkpoint):
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        ask = {"prompt": "hi", "max_tokens": 1, "n": 130, "logit_bias": {"5": 1000, "6": -101, "7": 3}}
        reply = await client.post(TEXT, json=ask)
        assert len(reply.json()["choices"]) == 130
        assert rig.workers[0].jobs[0].sampling.logit_bias == {5: 100.0, 6: -100.0, 7: 3.0}


async def test_token_ids_may_have_a_point(checkpoint):
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        for ids in ([5, 6], [5.0, 6], [[5.0, 6.0]]):
            reply = await client.post(TEXT, json={"prompt": ids, "max_tokens": 2, "return_token_ids": True})
            assert json.dumps(reply.json()["choices"][0]["prompt_token_ids"]) == "[5, 6]"


async def refusal(client: httpx.AsyncClient, path: str, body: bytes, status: int = 400) -> dict[str, Any]:
    """The error's parts, its shape checked."""
    reply = await client.post(path, content=body)
    assert reply.status_code == status, (path, body[:200], reply.status_code, reply.text[:300])
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == (TYPES[status], status)
    assert error["message"] and "Traceback" not in error["message"]
    message = error["message"].replace(f"the path '{path}'", "the path").replace("GET /openapi.json", "GET")
    assert "/" not in message.split("; use ")[0]  # no file's
    return error


async def test_bad_bodies_are_refused_and_good_ones_then_served(checkpoint):
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        for body in NOT_JSON:
            assert (await refusal(client, TEXT, body))["param"] is None
        for (path, body), param in NAMED:
            assert (await refusal(client, path, body))["param"] == param, body[:200]
        assert rig.store.placed == []
        assert (await client.post(TEXT, json={"prompt": "hi", "max_tokens": 2})).status_code == 200
        assert (await client.post(CHAT, json={"messages": SAY, "max_tokens": 2})).status_code == 200


async def test_what_does_not_exist_is_404(checkpoint):
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        for path, body in [chat(model="gpt-9"), text(model="gpt-9"), ("/tokenize", b'{"model": "x", "prompt": "a"}')]:
            assert (await refusal(client, path, body, 404))["param"] == "model"
        error = await refusal(client, "/v1/nothing", b"{}", 404)
        assert error["param"] is None and "'/v1/nothing' does not exist" in error["message"]
        assert "'/nowhere' does not exist" in (await client.get("/nowhere?a=b")).json()["error"]["message"]
        assert (await client.get("/v1/models/nope")).json()["error"]["param"] == "model"
        assert (await client.post(TEXT, json={"prompt": "hi", "max_tokens": 2, "model": ""})).status_code == 200
        assert (await refusal(client, "/v1/models", b"{}", 405))["param"] is None


async def test_a_prompt_longer_than_the_context_is_told_both_numbers(checkpoint):
    workers = pair()
    workers[1].max_model_len = 64
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        for path, body in [text(prompt=[5] * 70), chat(messages=[{"role": "user", "content": "a b " * 70}])]:
            message = (await refusal(client, path, body))["message"]
            assert "64" in message and ("70" in message or path == CHAT)
        error = await refusal(client, *text(prompt=[5] * 60, max_tokens=65))
        assert error["param"] == "max_tokens" and all(number in error["message"] for number in ("65", "64"))


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        (TEXT, {"prompt": [5] * 2040, "max_tokens": 8}),
        (TEXT, {"prompt": [5] * 2040, "max_tokens": 2048}),
        (CHAT, {"messages": SAY, "max_tokens": 2048}),
        (CHAT, {"messages": SAY, "max_completion_tokens": 2040}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2048}),
    ],
)
async def test_an_answer_gets_what_the_prompt_leaves_of_the_context(checkpoint, path, ask):
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        assert (await client.post(path, json=ask)).status_code == 200
        [job] = rig.workers[0].jobs
        assert len(job.token_ids) + job.sampling.max_tokens == 2048


async def test_a_prompt_is_cut_so_that_the_answer_fits_which_the_context_can_hold(checkpoint):
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        ask = {"prompt": "hi " * 3000, "truncate_prompt_tokens": -1}
        for side in ("left", "right"):
            usage = (await client.post(TEXT, json=ask | {"truncation_side": side})).json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2048 - 16, 16)
            error = await refusal(client, *text(**ask, truncation_side=side, max_tokens=5000))
            assert error["param"] == "max_tokens" and "max_tokens is 5000" in error["message"]


async def test_a_body_over_the_limit_is_413(checkpoint):
    limited = gateway(checkpoint, pair(), max_body_nbytes=4096)
    async with limited as rig, rig.client() as client:
        for path, body in [text(prompt="a" * 5000), chat(user="a" * 5000)]:
            assert "4096" in (await refusal(client, path, body, 413))["message"]
        assert (await client.post(TEXT, json={"prompt": "hi", "max_tokens": 2})).status_code == 200


async def test_a_compressed_body_is_415_that_names_the_header(checkpoint):
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        for path, body in [text(), chat(), ("/tokenize", b'{"prompt": "a"}')]:
            sent = {"content": gzip.compress(body), "headers": {"Content-Encoding": "gzip"}}
            reply = await client.post(path, **sent)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["type"], error["param"]) == (415, 415, TYPES[400], None)
            assert "Content-Encoding 'gzip'" in error["message"]
            assert (await client.post(path, content=body, headers={"Content-Encoding": "identity"})).status_code == 200


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content }}", "chat template"),
        ("{{ messages[0].content + 1 }}", "chat template"),
        ("{{ 1 // 0 }}", "chat template"),
        ("{{ messages[0].content | dictsort }}", "chat template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"),
        ("{% for i in range(10**9) %}x{% endfor %}", "chat template"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "chat template"),
        ("{{ messages | nosuch }}", None),
        ("{% if %}", None),
    ],
)
async def test_a_broken_chat_template_blames_the_messages_or_stops_the_start(checkpoint, template, words):
    broken = replace(checkpoint, chat_template=template)
    if words is None:
        with pytest.raises(ConfigError, match="chat template"):
            Prompting(broken)
        return
    async with gateway(broken, pair()) as rig, rig.client() as client:
        error = await refusal(client, *chat())
        assert (error["param"], words in error["message"]) == ("messages", True)
        assert (await client.post(TEXT, json={"prompt": "hi", "max_tokens": 2})).status_code == 200


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}", "hi;"),
        ("{{ [messages[0].content, 'é'] | tojson }}", '["hi", "é"]'),
        ("{{ [messages[0].content, 'é'] | tojson(ensure_ascii=True, separators=(',', ':')) }}", '["hi","\\u00e9"]'),
        (
            "{{ {'b': 1, 'a': messages[0].content} | tojson(indent=1, sort_keys=true) }}",
            '{\n "a": "hi",\n "b": 1\n}',
        ),
    ],
)
def test_a_template_may_use_what_transformers_gives_it(checkpoint, template, text):
    prompting = Prompting(replace(checkpoint, chat_template=template))
    assert prompting.render(parse(chat()[1], ChatRequest)) == text


@pytest.mark.parametrize("said", ["", "<", "i", "im_end", "so ", "  so\n", "a<|im_end|>b"])
@pytest.mark.parametrize("trims", [False, True])
def test_an_answer_goes_on_where_the_last_message_ends_whatever_that_says(checkpoint, said, trims):
    content = "m.content | trim" if trims else "m.content"
    template = f"{{% for m in messages %}}<|im_start|>\n{{{{ {content} }}}}<|im_end|>{{% endfor %}}<|im_end|>"
    prompting = Prompting(replace(checkpoint, chat_template=template))
    asked = {"messages": [*SAY, {"role": "assistant", "content": said}], "continue_final_message": True}
    text = prompting.render(msgspec.convert(asked, ChatRequest))
    assert text == f"<|im_start|>\nhi<|im_end|><|im_start|>\n{said.strip() if trims else said}"


def chained(count: int) -> dict[str, Any]:
    """Schemas that refer one to the next: JSON of a few levels, and as deep as there are."""
    links = {f"a{at}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{at + 1}"}}} for at in range(count)}
    return {"$defs": links | {f"a{count}": {"type": "string"}}, "$ref": "#/$defs/a0"}


async def test_a_schema_that_refers_and_refers_does_not_end_the_gateway(checkpoint):
    rules = "\n".join(f"a{at}: a{at + 1}" for at in range(5000))
    tool = {"type": "function", "function": {"name": "f", "parameters": chained(3000)}}
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        for asked in (
            chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": chained(3000)}}),
            chat(tools=[tool], tool_choice="required", truncate_prompt_tokens=9),
            text(structured_outputs={"grammar": f'start: a0\n{rules}\na5000: "x"'}),
        ):
            reply = await client.post(asked[0], content=asked[1])
            assert reply.status_code == 200, reply.text[:300]
