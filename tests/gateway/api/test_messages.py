"""/v1/messages: Anthropic's requests, answers, events and errors, with fake workers that answer what a model would."""

import json
from typing import Any

import msgspec
import pytest

from gateway.api.openapi import MessagesReply
from gateway.reasoning.harmony import Harmony
from tests.gateway.gateway_rig import gateway, pair
from tests.gateway.sayings import saying, with_specials
from tests.gateway.thinking_models import ANALYSIS, CHANNELS, FINAL, HYBRID, SAID
from tests.gateway.tool_calls import CALL, PARAMETERS, TWO

pytestmark = pytest.mark.slow

HI: Any = {"max_tokens": 6, "messages": [{"role": "user", "content": "hi"}]}
WEATHER = {"name": "get_weather", "description": "how it is outside", "input_schema": PARAMETERS}
TOOLS: Any = [WEATHER, {"type": "custom", "name": "now", "input_schema": {"type": "object"}}]
USE = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "sunny"}]}


@pytest.fixture
async def rig(checkpoint):
    async with gateway(checkpoint, pair(period_s=0.005)) as rig:
        yield rig


async def ask(rig, **fields: Any) -> Any:
    async with rig.client() as http:
        reply = await http.post("/v1/messages", json=HI | fields)
        assert reply.status_code == 200, reply.text
        return reply.json()


async def events(rig, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream; each is named by its type, as clients expect."""
    async with rig.client() as http:
        text = (await http.post("/v1/messages", json=HI | {"stream": True} | fields)).text
    told = [event.split("\n") for event in text.split("\n\n") if event]
    bodies = [json.loads(data.removeprefix("data: ")) for _, data in told]
    assert [name for name, _ in told] == [f"event: {body['type']}" for body in bodies]
    return bodies


def built(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the blocks that a stream's events make, as Anthropic's clients put them together."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for body in bodies:
        if body["type"] == "content_block_start":
            assert not is_open and body["index"] == len(blocks)
            blocks.append(body["content_block"] | {"json": ""})
            is_open = True
        elif body["type"] == "content_block_delta":
            delta = dict(body["delta"])
            assert is_open and body["index"] == len(blocks) - 1
            match delta.pop("type"):
                case "input_json_delta":
                    blocks[-1]["json"] += delta["partial_json"]
                case "text_delta":
                    blocks[-1]["text"] += delta["text"]
                case "thinking_delta":
                    blocks[-1]["thinking"] += delta["thinking"]
        elif body["type"] == "content_block_stop":
            assert is_open and body["index"] == len(blocks) - 1
            is_open = False
    assert not is_open
    for block in blocks:
        if text := block.pop("json"):
            block["input"] = json.loads(text)
    return blocks


def prompt_of(rig, job: int = -1) -> str:
    return rig.front.prompting.tokenizer.decode(rig.workers[0].jobs[job].token_ids, skip_special_tokens=False)


async def test_an_answer_is_a_message_of_the_shape_that_is_described(rig):
    reply = await ask(rig, system="be brief", metadata={"user_id": "u"})
    assert msgspec.to_builtins(msgspec.convert(reply, MessagesReply)) == reply
    assert (reply["type"], reply["role"], reply["model"]) == ("message", "assistant", rig.front.model)
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("max_tokens", None)
    assert reply["id"].startswith("msg-") and reply["content"][0]["text"]
    counts = reply["usage"]
    assert counts["output_tokens"] == 6
    assert counts["input_tokens"] + counts["cache_read_input_tokens"] == len(rig.workers[0].jobs[0].token_ids)
    assert "system\nbe brief" in prompt_of(rig) and "user\nhi" in prompt_of(rig)


async def test_a_stream_says_the_same(rig):
    whole = await ask(rig)
    bodies = await events(rig)
    kinds = [body["type"] for body in bodies]
    num_deltas = kinds.count("content_block_delta")
    middle = ["content_block_start", *["content_block_delta"] * num_deltas, "content_block_stop"]
    assert num_deltas > 1
    assert kinds == ["message_start", *middle, "message_delta", "message_stop"]
    assert built(bodies) == whole["content"]
    started, ended = bodies[0]["message"], bodies[-2]
    assert (started["content"], started["stop_reason"], started["usage"]["output_tokens"]) == ([], None, 0)
    assert started["usage"]["input_tokens"] + started["usage"]["cache_read_input_tokens"] > 0
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"]["output_tokens"] == 6


async def test_what_ends_an_answer_is_told(checkpoint):
    async with saying(checkpoint, "one two three") as (rig, _):
        assert (await ask(rig, max_tokens=50))["stop_reason"] == "end_turn"
        stopped = await ask(rig, max_tokens=50, stop_sequences=["zero", " two"])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " two")
        assert stopped["content"] == [{"type": "text", "text": "one"}]


async def test_the_end_of_the_context_is_not_max_tokens(rig):
    long = [{"role": "user", "content": "one " * 1950}]
    reply = await ask(rig, messages=long, max_tokens=2000)
    assert reply["stop_reason"] == "model_context_window_exceeded"


async def test_calls_are_blocks_of_their_own(checkpoint):
    async with saying(checkpoint, f"Let me look. {TWO}") as (rig, _):
        reply = await ask(rig, max_tokens=200, tools=TOOLS)
        text, first, second = reply["content"]
        assert text == {"type": "text", "text": "Let me look. "}
        assert (first["name"], first["input"]) == ("get_weather", {"city": "Paris"})
        assert (second["name"], second["input"]) == ("now", {})
        assert first["id"] != second["id"] and reply["stop_reason"] == "tool_use"
        streamed = await events(rig, max_tokens=200, tools=TOOLS)
        without_ids = [{**block, "id": ""} if "id" in block else block for block in reply["content"]]
        assert [{**block, "id": ""} if "id" in block else block for block in built(streamed)] == without_ids
        assert streamed[-2]["delta"]["stop_reason"] == "tool_use"
        alone = {"type": "auto", "disable_parallel_tool_use": True}
        lone = await ask(rig, max_tokens=200, tools=TOOLS, tool_choice=alone)
        assert [block["type"] for block in lone["content"]] == ["text", "tool_use"]
        told = await ask(rig, max_tokens=200, tools=TOOLS, tool_choice={"type": "none"})
        assert [block["type"] for block in told["content"]] == ["text"] and "get_weather" not in prompt_of(rig)


async def test_a_call_that_is_cut_off_is_text_unless_it_was_told(checkpoint):
    async with saying(checkpoint, CALL) as (rig, _):
        reply = await ask(rig, max_tokens=20, tools=TOOLS)
        assert [block["type"] for block in reply["content"]] == ["text"]
        assert reply["content"][0]["text"].startswith("<tool_call>") and reply["stop_reason"] == "max_tokens"


async def test_arguments_that_json_cannot_carry_on_come_as_they_were_written(checkpoint):
    broken = CALL.replace("Paris", "\\ud83d")
    async with saying(checkpoint, broken) as (rig, _):
        (call,) = (await ask(rig, max_tokens=200, tools=TOOLS))["content"]
        assert call["input"] == {"raw": '{"city": "\\ud83d"}'}


async def test_thinking_is_as_the_client_says_whatever_the_operators_default(checkpoint):
    model = with_specials(checkpoint, HYBRID, ("<think>", "</think>"))
    async with saying(model, "hello", default_chat_template_kwargs={"enable_thinking": True}) as (rig, _):
        await ask(rig, thinking={"type": "disabled"})
        assert prompt_of(rig).endswith("<think>\n\n</think>\n\n")
        await ask(rig, thinking={"type": "disabled"}, chat_template_kwargs={"enable_thinking": True})
        assert not prompt_of(rig).endswith("</think>\n\n")


async def test_thoughts_are_blocks_unless_they_are_not_wanted(checkpoint):
    model = with_specials(checkpoint, CHANNELS, Harmony.markers)
    async with saying(model, f"{ANALYSIS}{FINAL}{SAID}<|return|>") as (rig, _):
        reply = await ask(rig, max_tokens=200)
        thinking, text = reply["content"]
        assert (thinking["type"], text["type"], thinking["signature"]) == ("thinking", "text", "")
        assert 0 < reply["usage"]["output_tokens_details"]["thinking_tokens"] < reply["usage"]["output_tokens"]
        assert thinking["thinking"] and built(await events(rig, max_tokens=200)) == reply["content"]
        for unwanted in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
            assert (await ask(rig, max_tokens=200, thinking=unwanted))["content"] == [text]


async def test_a_conversation_with_calls_is_the_same_as_a_chat(rig):
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, USE]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "and now?"}]},
    ]
    made = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "user", "content": "and now?"},
    ]
    given = {"messages": blocks, "system": [{"type": "text", "text": "be brief"}], "tools": TOOLS}
    await ask(rig, **given)
    functions = [
        {"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"]} | described(t)}
        for t in TOOLS
    ]
    async with rig.client() as http:
        await http.post("/v1/chat/completions", json={"messages": chat, "tools": functions, "max_tokens": 2})
        counted = await http.post("/v1/messages/count_tokens", json=given)
    first, second = rig.workers[0].jobs
    assert first.token_ids == second.token_ids
    assert counted.json() == {"input_tokens": len(first.token_ids)}


def described(tool: dict[str, Any]) -> dict[str, str]:
    return {"description": tool["description"]} if "description" in tool else {}


async def test_the_assistants_last_words_are_gone_on_with(rig):
    await ask(rig, messages=[*HI["messages"], {"role": "assistant", "content": "The answer is ("}])
    assert prompt_of(rig).endswith("The answer is (")


async def test_a_form_is_kept(rig):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    await ask(rig, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=40)
    assert rig.workers[0].jobs[0].sampling.grammar


async def test_a_lost_worker_is_an_error_event(rig):
    async with (
        rig.client() as http,
        http.stream("POST", "/v1/messages", json=HI | {"max_tokens": 500, "stream": True}) as reply,
    ):
        lines = []
        async for line in reply.aiter_lines():
            lines.append(line)
            if "content_block_delta" in line:
                rig.workers[1].break_streams()
    last = json.loads([line for line in lines if line.startswith("data: ")][-1].removeprefix("data: "))
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
    assert "event: error" in lines
    await rig.until(rig.is_idle)


def turns(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [*HI["messages"], {"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, r"messages[0].role"),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, "context"),
        (turns({"type": "image", "source": {}}), "messages[1].content[0]"),
        (turns({"type": "text"}), "messages[1].content[0].text"),
        (turns({"type": "tool_result"}), "messages[1].content[0].tool_use_id"),
        (turns({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}), "[0].content[0]"),
        (turns({"type": "tool_use", "id": "a", "name": "f"}, role="assistant"), "messages[1].content[0].input"),
        (turns({"type": "server_tool_use"}, role="assistant"), "messages[1].content[0]"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "two words", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "messages[99]"}}, "tool_choice"),
        (turns(USE, role="assistant"), "messages[1]: the last message of the assistant calls tools"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "output_config.format"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ],
)
async def test_what_it_cannot_do_is_named_as_anthropic_does(rig, fields, words):
    async with rig.client() as http:
        reply = await http.post(
            "/v1/messages", json={name: value for name, value in (HI | fields).items() if value is not None}
        )
    body = reply.json()
    assert (reply.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert words in body["error"]["message"] and body["request_id"] == reply.headers["x-request-id"]
    assert rig.store.placed == []


async def test_a_model_that_is_not_served_and_a_key_that_is_none(checkpoint):
    async with gateway(checkpoint, pair(), api_key="secret") as rig, rig.client() as http:
        refused = await http.post("/v1/messages", json=HI, headers={"x-api-key": "wrong"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        known = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
        missing = await http.post("/v1/messages", json=HI | {"model": "claude"}, headers=known)
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        assert (await http.post("/v1/messages/count_tokens", json=HI, headers=known)).status_code == 200
