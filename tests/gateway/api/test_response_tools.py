"""Tool calls and formats of /v1/responses, with fake workers that answer what a model would."""

import json
from typing import Any

import msgspec
import openai
import pydantic
import pytest

from gateway.api.openapi import OutputCall, ResponseReply
from gateway.reasoning.harmony import Harmony
from tests.gateway.sayings import SAY, saying, with_specials
from tests.gateway.thinking_models import ANALYSIS, CHANNELS
from tests.gateway.tool_calls import CALL, HISTORY, PARAMETERS, PARIS, TWO

pytestmark = pytest.mark.slow

WEATHER = {"type": "function", "name": "get_weather", "description": "how it is outside", "parameters": PARAMETERS}
TOOLS: Any = [WEATHER | {"strict": False}, {"type": "function", "name": "now"}]
NESTED: Any = [{"type": "function", "function": {key: tool[key] for key in tool if key != "type"}} for tool in TOOLS]
NAMED = {"type": "function", "name": "now"}
BROKEN = '<tool_call>[{"name": "get_weather", "arguments": {"city": Paris}}]</tool_call>'


async def whole(checkpoint, text: str, **fields: Any) -> Any:
    async with saying(checkpoint, text) as (rig, client):
        return await client.responses.create(model=rig.front.model, input="weather?", tools=TOOLS, **fields)


async def streamed(checkpoint, text: str, **fields: Any) -> list[Any]:
    async with saying(checkpoint, text) as (rig, client):
        ask = {"model": rig.front.model, "input": "weather?", "tools": TOOLS, "stream": True} | fields
        return [event async for event in await client.responses.create(**ask)]


def calls(reply: Any) -> list[tuple[str, str]]:
    return [(item.name, item.arguments) for item in reply.output if item.type == "function_call"]


async def test_a_call_is_an_item_of_its_own(checkpoint):
    reply = await whole(checkpoint, CALL)
    (call,) = reply.output
    assert (call.type, call.name, call.arguments, call.status) == ("function_call", "get_weather", PARIS, "completed")
    assert call.id.startswith("fc_") and call.call_id.startswith("call_") and call.id != call.call_id
    assert (reply.status, reply.output_text, reply.tool_choice, reply.parallel_tool_calls) == (
        "completed", "", "auto", True,
    )  # fmt: skip
    assert [tool.name for tool in reply.tools] == ["get_weather", "now"]
    assert reply.tools[0].parameters == PARAMETERS and reply.tools[0].strict is False


async def test_a_reply_with_calls_has_the_shape_that_is_described(checkpoint):
    async with saying(checkpoint, CALL) as (rig, _), rig.client() as http:
        reply = (await http.post("/v1/responses", json={"input": "weather?", "tools": TOOLS})).json()
        described = msgspec.convert(reply, ResponseReply).output
        assert [type(item) for item in described] == [OutputCall]
        assert msgspec.to_builtins(described) == reply["output"]


async def test_words_before_a_call_are_a_message(checkpoint):
    reply = await whole(checkpoint, f"Let me look. {TWO}")
    assert [item.type for item in reply.output] == ["message", "function_call", "function_call"]
    assert reply.output_text == "Let me look. "
    assert calls(reply) == [("get_weather", PARIS), ("now", "{}")]
    assert len({item.id for item in reply.output}) == 3


async def test_a_stream_tells_one_call_after_the_other(checkpoint):
    events = await streamed(checkpoint, f"Look: {TWO}")
    kinds = [event.type.removeprefix("response.") for event in events]
    runs = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    message = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = [f"function_call_arguments.{kind}" for kind in ("delta", "done")]
    items = [["output_item.added", *item, "output_item.done"] for item in (message, call, call)]
    assert runs == ["created", "in_progress", *items[0], *items[1], *items[2], "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    output = events[-1].response.output
    assert calls(events[-1].response) == [("get_weather", PARIS), ("now", "{}")]
    added = [event.item for event in events if event.type == "response.output_item.added"][1:]
    assert [(item.name, item.arguments, item.status) for item in added] == [
        ("get_weather", "", "in_progress"),
        ("now", "", "in_progress"),
    ]
    assert [item.call_id for item in added] == [item.call_id for item in output[1:]]
    for index in (1, 2):
        told = [event for event in events if event.type.startswith("response.function_call_arguments")]
        mine = [event for event in told if event.output_index == index]
        assert {event.item_id for event in mine} == {output[index].id}
        assert "".join(event.delta for event in mine[:-1]) == mine[-1].arguments == output[index].arguments
        assert mine[-1].name == output[index].name


@pytest.mark.parametrize("text", ["It is sunny.", "<tool_call>[{]", "<tool_call>", "a {b} [c]", CALL[:30]])
async def test_what_is_no_call_is_said(checkpoint, text):
    reply = await whole(checkpoint, text)
    assert ([item.type for item in reply.output], reply.output_text) == (["message"], text)
    last = (await streamed(checkpoint, text))[-1].response
    assert ([item.type for item in last.output], last.output_text) == (["message"], text)


async def test_a_broken_call_is_said_when_whole_and_incomplete_in_a_stream(checkpoint):
    reply = await whole(checkpoint, BROKEN)
    assert ([item.type for item in reply.output], reply.output_text) == (["message"], BROKEN)
    call, message = (await streamed(checkpoint, BROKEN))[-1].response.output
    assert (call.type, call.arguments, call.status) == ("function_call", '{"city": ', "incomplete")
    assert message.content[0].text == "Paris}}]</tool_call>"


async def test_a_call_that_is_cut_off_is_incomplete(checkpoint, tokenizer):
    ids = tokenizer.encode(CALL).ids
    cut = next(count for count in range(len(ids)) if '"city' in tokenizer.decode(ids[:count]))
    reply = await whole(checkpoint, CALL, max_output_tokens=cut)
    assert (reply.status, calls(reply), reply.output_text) == ("incomplete", [], tokenizer.decode(ids[:cut]))
    last = (await streamed(checkpoint, CALL, max_output_tokens=cut))[-1]
    assert last.type == "response.incomplete" and last.response.output[0].status == "incomplete"


@pytest.mark.parametrize(("in_parallel", "count"), [(None, 2), (True, 2), (False, 1)])
async def test_calls_come_one_at_a_time_if_asked(checkpoint, in_parallel, count):
    fields = {} if in_parallel is None else {"parallel_tool_calls": in_parallel}
    reply = await whole(checkpoint, TWO, **fields)
    assert (len(calls(reply)), reply.parallel_tool_calls) == (count, in_parallel is not False)
    assert len(calls((await streamed(checkpoint, TWO, **fields))[-1].response)) == count


@pytest.mark.parametrize("choice", ["required", NAMED, "none"])
async def test_a_choice_is_that_of_a_chat(checkpoint, choice):
    own = NAMED | {"function": {"name": "now"}} if choice == NAMED else choice
    async with saying(checkpoint, '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>') as (rig, client):
        reply: Any = await client.responses.create(
            model=rig.front.model, input="weather?", tools=TOOLS, tool_choice=choice, max_output_tokens=40
        )
        nested: Any = {"tools": NESTED, "tool_choice": own, "max_tokens": 40}
        await client.chat.completions.create(model=rig.front.model, messages=SAY, **nested)
        mine, theirs = rig.workers[0].jobs
        assert (mine.token_ids, mine.sampling.grammar) == (theirs.token_ids, theirs.sampling.grammar)
        assert bool(mine.sampling.grammar) == (choice != "none") == bool(calls(reply))
        told = reply.model_dump(mode="json")
        assert told["tool_choice"] == choice and len(told["tools"]) == 2


async def test_what_is_strict_is_enforced(checkpoint):
    async with saying(checkpoint, CALL) as (rig, client):
        for strict in (False, True):
            tools: Any = [WEATHER | {"strict": strict}]
            await client.responses.create(model=rig.front.model, input="a", tools=tools)
        plain, strict = (job.sampling.grammar for job in rig.workers[0].jobs)
        assert plain == "" and "city" in strict


async def test_calls_and_their_results_are_the_same_as_in_a_chat(checkpoint):
    items = [
        {"role": "user", "content": "weather?"},
        *(
            {"type": "function_call", "id": "fc", "call_id": name, "name": "get_weather", "arguments": PARIS}
            for name in ("call_1", "call_2")
        ),
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "rainy"}]},
    ]
    async with saying(checkpoint, "hi") as (rig, client):
        ask: Any = {"model": rig.front.model, "tools": TOOLS}
        await client.responses.create(input=items, **ask)
        await client.chat.completions.create(model=rig.front.model, messages=HISTORY, tools=NESTED)
        said: Any = [items[0], {"role": "assistant", "content": "Let me look."}, *items[1:]]
        await client.responses.create(input=said, **ask)
        in_turn: Any = [HISTORY[0], HISTORY[1] | {"content": "Let me look."}, *HISTORY[2:]]
        await client.chat.completions.create(model=rig.front.model, messages=in_turn, tools=NESTED)
        ids = [job.token_ids for job in rig.workers[0].jobs]
        assert ids[0] == ids[1] != ids[2] == ids[3]


async def test_an_agent_goes_round_with_what_came(checkpoint):
    """What was answered, given back as it is, is the conversation that it was."""
    async with saying(checkpoint, f"Let me look. {CALL}") as (rig, client):
        ask: Any = {
            "model": rig.front.model,
            "tools": TOOLS,
            "store": False,
            "include": ["reasoning.encrypted_content"],
        }
        said: Any = [{"role": "user", "content": "weather?"}]
        first: Any = await client.responses.create(input=said, **ask)
        said += [item.model_dump() for item in first.output]
        said.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sunny"})
        rig.workers[0].jobs.clear()
        await client.responses.create(input=said, **ask)
        shown = rig.front.prompting.tokenizer.decode(rig.workers[0].jobs[0].token_ids, skip_special_tokens=False)
        assert f"<|im_start|>assistant\nLet me look. \n{CALL}<|im_end|>" in shown
        assert "<tool_response>\nsunny\n</tool_response>" in shown


async def test_a_call_that_was_cut_off_is_taken_back(checkpoint, tokenizer):
    ids = tokenizer.encode(CALL).ids
    cut = next(count for count in range(len(ids)) if '"Par' in tokenizer.decode(ids[:count]))
    [item] = (await streamed(checkpoint, CALL, max_output_tokens=cut))[-1].response.output
    said: Any = [{"role": "user", "content": "weather?"}, item.model_dump()]
    said.append({"type": "function_call_output", "call_id": item.call_id, "output": "it was cut off"})
    async with saying(checkpoint, "hi") as (rig, client):
        await client.responses.create(model=rig.front.model, input=said)
        shown = rig.front.prompting.tokenizer.decode(rig.workers[0].jobs[0].token_ids, skip_special_tokens=False)
    assert '{"name": "get_weather", "arguments": {"city": "Par' in shown and "it was cut off" in shown


async def test_what_was_thought_comes_before_the_call(checkpoint):
    harmony = with_specials(checkpoint, CHANNELS, Harmony.markers)
    call = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>"
    async with saying(harmony, f"{ANALYSIS}<|start|>assistant{call}") as (rig, client):
        ask: Any = {"model": rig.front.model, "tools": TOOLS}
        reply: Any = await client.responses.create(input="weather?", **ask)
        assert [item.type for item in reply.output] == ["reasoning", "function_call"]
        assert calls(reply) == [("get_weather", PARIS)] and reply.usage.output_tokens_details.reasoning_tokens > 0
        said: Any = [{"role": "user", "content": "weather?"}, *(item.model_dump() for item in reply.output)]
        said.append({"type": "function_call_output", "call_id": reply.output[1].call_id, "output": "sunny"})
        rig.workers[0].jobs.clear()
        await client.responses.create(input=said, **ask)
        shown = rig.front.prompting.tokenizer.decode(rig.workers[0].jobs[0].token_ids, skip_special_tokens=False)
        assert "functions.get_weather" in shown and "sunny" in shown


class City(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    city: str


async def test_the_clients_own_helpers_make_objects_of_answers_and_of_calls(checkpoint):
    async with saying(checkpoint, PARIS) as (rig, client):
        reply = await client.responses.parse(model=rig.front.model, input="where?", text_format=City)
        assert reply.output_parsed == City(city="Paris")
        chat = await client.chat.completions.parse(model=rig.front.model, messages=SAY, response_format=City)
        assert chat.choices[0].message.parsed == reply.output_parsed
        mine, theirs = (job.sampling.grammar for job in rig.workers[0].jobs)
        assert mine == theirs != ""
        told = reply.model_dump(mode="json", by_alias=True)["text"]["format"]
        assert told["type"] == "json_schema" and told["schema"]["required"] == ["city"]
    tool = openai.pydantic_function_tool(City, name="get_weather")["function"]
    async with saying(checkpoint, CALL) as (rig, client):
        ask: Any = {"model": rig.front.model, "input": "weather?", "tools": [{"type": "function", **tool}]}
        parsed: Any = await client.responses.parse(**ask)
        assert json.loads(parsed.output[0].arguments) == {"city": "Paris"}
        async with client.responses.stream(**ask) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds.count("response.function_call_arguments.done") == 1
        assert calls(final) == [("get_weather", PARIS)]


@pytest.mark.parametrize("text", [{"format": {"type": "text"}}, {}, {"verbosity": "low"}])
async def test_plain_text_needs_no_grammar(checkpoint, text):
    async with saying(checkpoint, "hi") as (rig, client):
        reply = await client.responses.create(model=rig.front.model, input="a", text=text)
        assert reply.output_text == "hi" and rig.workers[0].jobs[0].sampling.grammar == ""


PATCH = {"type": "custom", "name": "apply_patch", "description": "changes files"}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}
PATCHED = '<tool_call>[{"name": "apply_patch", "arguments": {"input": "a \\"b\\"\\n"}}]</tool_call>'


async def test_a_custom_tool_takes_text_and_is_taken_back(checkpoint):
    async with saying(checkpoint, f"Look: {PATCHED}") as (rig, client):
        ask: Any = {"model": rig.front.model, "tools": [PATCH | {"format": GRAMMAR}, TOOLS[1]]}
        reply: Any = await client.responses.create(input="change it", **ask)
        call = reply.output[1]
        assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", 'a "b"\n')
        assert [tool.type for tool in reply.tools] == ["custom", "function"]
        events = [event async for event in await client.responses.create(input="a", stream=True, **ask)]
        told = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
        assert [event.type.rpartition(".")[2] for event in told] == ["delta", "done"]
        assert told[0].delta == told[1].input == events[-1].response.output[1].input == call.input
        said: Any = [{"role": "user", "content": "change it"}, *(item.model_dump() for item in reply.output)]
        said.append({"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"})
        rig.workers[0].jobs.clear()
        await client.responses.create(input=said, **ask)
        shown = rig.front.prompting.tokenizer.decode(rig.workers[0].jobs[0].token_ids, skip_special_tokens=False)
        assert "start: /x+/" in shown and f"Look: \n{PATCHED}<|im_end|>" in shown
        assert "<tool_response>\ndone\n</tool_response>" in shown


async def test_tools_that_run_elsewhere_are_skipped_with_a_word(checkpoint, caplog):
    caplog.set_level("INFO", logger="gateway.http.routes.responses")
    async with saying(checkpoint, CALL) as (rig, client):
        others: Any = [{"type": "web_search"}, WEATHER, {"type": "mcp", "server_label": "x"}]
        reply = await client.responses.create(model=rig.front.model, input="weather?", tools=others)
        assert calls(reply) == [("get_weather", PARIS)] and [tool.type for tool in reply.tools] == ["function"]
        assert any("web_search, mcp" in record.message for record in caplog.records)
        alone = await client.responses.create(model=rig.front.model, input="weather?", tools=others[:1])
        assert alone.tools == [] and alone.output_text == CALL


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_shown(checkpoint, mode):
    names = [{"type": "function", "name": "now"}]
    async with saying(checkpoint, '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>') as (rig, client):
        ask: Any = {"model": rig.front.model, "tools": TOOLS, "max_output_tokens": 40}
        choice: Any = {"type": "allowed_tools", "mode": mode, "tools": names}
        reply: Any = await client.responses.create(input="weather?", tool_choice=choice, **ask)
        assert calls(reply) == [("now", "{}")] and reply.tool_choice.mode == mode
        nested: Any = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
        for tools, own in ((NESTED, {"type": "allowed_tools", "allowed_tools": nested}), (NESTED[1:], mode)):
            given: Any = {"tools": tools, "tool_choice": own, "max_tokens": 40}
            await client.chat.completions.create(model=rig.front.model, messages=SAY, **given)
        jobs = [(job.token_ids, job.sampling.grammar) for job in rig.workers[0].jobs]
        assert jobs[0] == jobs[1] == jobs[2] and bool(jobs[0][1]) == (mode == "required")
