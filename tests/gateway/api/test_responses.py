"""/v1/responses through openai-python, and what it refuses."""

import gc
import weakref

import openai
import pytest

from contracts.sampling import SamplingParams
from gateway.api.openai.responses import ResponsesFormatter
from gateway.api.openai.schema import ResponsesRequest
from gateway.generation.output_parser import parser_spec
from gateway.generation.usage import Usage
from gateway.tool_calling.tool_choice import Calling, FlatTool
from tests.gateway.gateway_rig import gateway, pair

pytestmark = pytest.mark.slow

TOOL = {"type": "function", "name": "f"}
NOTHING = Usage(0, 0, 0)
WRONG = {"parameters": {"type": "object", "properties": {"x": {"type": "no"}}}}
ALLOWED = {"type": "allowed_tools", "mode": "auto"}
JSON = {"text": {"format": {"type": "json_object"}}}


@pytest.fixture
async def rig(checkpoint):
    async with gateway(checkpoint, pair(period_s=0.005)) as rig:
        yield rig


@pytest.fixture
async def client(rig):
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="x", max_retries=0) as client:
        yield client


async def test_an_answer_is_whole(rig, client):
    reply = await client.responses.create(
        model=rig.front.model, input="hi", instructions="be brief", max_output_tokens=6
    )
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output_text and reply.store is False
    assert (reply.usage.output_tokens, reply.usage.input_tokens) == (6, len(rig.workers[0].jobs[0].token_ids))
    text = rig.front.prompting.tokenizer.decode(rig.workers[0].jobs[0].token_ids, skip_special_tokens=False)
    assert "system\nbe brief" in text and "user\nhi" in text


async def test_what_was_not_asked_for_is_told_as_openai_does(rig, client):
    ask = {"model": rig.front.model, "input": "hi", "max_output_tokens": 2}
    reply = await client.responses.create(**ask)
    assert (reply.tools, reply.tool_choice, reply.parallel_tool_calls, reply.metadata) == ([], "auto", True, {})
    reply = await client.responses.create(**ask, tool_choice="none", parallel_tool_calls=False, metadata={})
    assert (reply.tools, reply.tool_choice, reply.parallel_tool_calls, reply.metadata) == ([], "none", False, {})


async def test_the_callers_notes_come_back_whole_or_streamed(rig, client):
    ask = {"model": rig.front.model, "input": "hi", "max_output_tokens": 2, "metadata": {"trace": "7", "é": ""}}
    assert (await client.responses.create(**ask)).metadata == ask["metadata"]
    events = [event async for event in await client.responses.create(**ask, stream=True)]
    assert events[0].response.metadata == events[-1].response.metadata == ask["metadata"]


class Notes(dict):
    """Whose end can be seen."""


def test_what_a_request_brings_is_not_kept_as_objects_while_it_is_answered(rig):
    """8 MB of JSON were 180 MB of them, of each request."""
    notes, schema = Notes(a=[]), Notes(type="object")
    tool = {"type": "function", "name": "f", "parameters": schema}
    request = ResponsesRequest(input="hi", metadata=notes, tools=[tool])
    reading = parser_spec(rig.front.prompting, "", Calling({0: FlatTool("f", None, schema, type="function")}))
    replies = ResponsesFormatter("i", "m", 0, request, SamplingParams(max_tokens=1, seed=0), reading)
    ends = [weakref.ref(notes), weakref.ref(schema)]
    del request, notes, schema, tool
    gc.collect()
    assert [end() for end in ends] == [None, None]
    assert b'"metadata":{"a":[]}' in replies.encode(replies.opening(0, NOTHING)[0])


async def test_messages_are_the_same_as_a_chat(rig, client):
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    words = [{"type": "input_text", "text": "one"}]
    parts = [said[0] | {"content": words, "type": None}, said[1] | {"type": "message"}]
    await client.responses.create(model=rig.front.model, input=parts, max_output_tokens=2)
    await client.chat.completions.create(model=rig.front.model, messages=said, max_tokens=2)
    jobs = rig.workers[0].jobs
    assert jobs[0].token_ids == jobs[1].token_ids


async def test_a_stream_has_every_event_in_order(rig, client):
    events = [
        event
        async for event in await client.responses.create(
            model=rig.front.model, input="one two three four", max_output_tokens=20, stream=True
        )
    ]
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    before = ["created", "in_progress", "output_item.added", "content_part.added"]
    after = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert deltas > 1
    assert kinds == [*before, *["output_text.delta"] * deltas, *after]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == events[-4].text


async def test_log_probabilities_are_told_if_included(rig, client):
    ask = {"model": rig.front.model, "input": "one two three", "max_output_tokens": 4, "top_logprobs": 2}
    assert (await client.responses.create(**ask)).output[0].content[0].logprobs == []
    ask["include"] = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    whole = await client.responses.create(**ask)
    told = whole.output[0].content[0].logprobs
    shown = "".join(entry.token for entry in told).replace("<|im_start|>", "")
    assert shown == whole.output_text and len(told) == 4
    assert all(len(entry.top_logprobs) == 2 and bytes(entry.bytes).decode() == entry.token for entry in told)
    assert whole.top_logprobs == 2
    events = [event async for event in await client.responses.create(**ask, stream=True)]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in told]
    assert [entry.token for entry in events[-1].response.output[0].content[0].logprobs] == [e.token for e in told]


async def test_a_long_input_is_cut_if_asked_and_what_limits_others_tools_changes_nothing(rig, client):
    ask = {"model": rig.front.model, "input": "one " * 3000, "max_output_tokens": 4}
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.responses.create(**ask)
    reply = await client.responses.create(**ask, truncation="auto", max_tool_calls=3)
    assert (reply.truncation, reply.max_tool_calls, reply.usage.input_tokens) == ("auto", 3, 2044)


async def test_a_lost_worker_is_an_error_event(rig, client):
    ask = {"model": rig.front.model, "input": "one", "max_output_tokens": 500, "stream": True}
    events = []
    async for event in await client.responses.create(**ask):
        if event.type == "response.output_text.delta":
            rig.workers[1].break_streams()
        events.append(event)
    assert (events[-1].type, events[-1].code) == ("error", "503")
    assert "worker" in events[-1].message
    await rig.until(rig.is_idle)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": [5]}]}, "input[0].output[0]"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"input": "a", "tools": [TOOL], "tool_choice": ALLOWED | {"tools": [{"name": "g"}]}}, "tool_choice.tools"),
        ({"input": "a", "tools": [TOOL], "tool_choice": ALLOWED | {"tools": [{}]}}, "tool_choice.tools[0]"),
        ({"input": "a", "tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "f"}]}, "input[0].input"),
        ({"input": "a", "tools": [{"name": "f"}]}, "tools[0].type"),
        ({"input": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"input": "a", "tools": [TOOL | {"name": "two words"}]}, "tools[0].name"),
        ({"input": "a", "tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"input": "a", "tools": [TOOL | {"parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"input": "a", "tools": [TOOL | WRONG | {"strict": True}]}, "tools[0].parameters"),
        ({"input": "a", "tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "tools": [TOOL], "tool_choice": "required"} | JSON, "text.format"),
        ({"input": "a", "max_tool_calls": 0}, "max_tool_calls"),
        ({"input": "a", "logprobs": True}, "logprobs"),
        ({"input": "a", "top_logprobs": 21}, "top_logprobs"),
        ({"input": "a", "include": ["everything"]}, "include[0]"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": WRONG["parameters"]}}},
            "text.format.schema",
        ),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"format": "byte"}, "strict": True}}},
            "text.format.schema",
        ),
        ({"input": "a", "response_format": {"type": "json_object"}} | JSON, "response_format"),
        ({"input": "a", "structured_outputs": {"regex": "a"}} | JSON, "structured_outputs"),
        ({"input": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"input": "a", "truncation": "middle"}, "truncation"),
        ({"input": "a", "metadata": "notes"}, "metadata"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "a " * 5000}, "input"),
    ],
)
async def test_what_it_cannot_do_is_named(rig, fields, param):
    async with rig.client() as client:
        reply = await client.post("/v1/responses", json=fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert rig.store.placed == []
