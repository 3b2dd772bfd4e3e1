"""Tool calls through openai-python and HTTP, with fake workers that answer what a model would."""

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import msgspec
import openai
import pydantic
import pytest

from checkpoint import Checkpoint
from contracts.errors import ConfigError
from gateway.api.openapi import ChatReply
from gateway.prompting.chat_template import Prompting
from gateway.prompting.request_fields import ChatRequest
from gateway.settings import GatewaySettings
from tests.gateway.sayings import SAY, prompt, saying
from tests.gateway.tool_calls import CALL, HISTORY, MADE, PARIS, TOOLS, TWO, WEATHER

pytestmark = pytest.mark.slow

NAMED = {"type": "function", "function": {"name": "now"}}

KNOWING = (
    "{% if tools %}[TOOL_CALLS][ARGS]{{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    "{{ m.role }}: {{ m.content }}{% for call in m.tool_calls %}{{ call.function.name }}"
    "{{ call.function.arguments.city }}{% endfor %};{% endfor %}"
)
"""A template that knows tools, and shows that arguments come as objects."""


async def whole(checkpoint: Checkpoint, text: str, **fields: Any):
    async with saying(checkpoint, text) as (rig, client):
        ask = {"model": rig.front.model, "messages": SAY, "tools": TOOLS} | fields
        return (await client.chat.completions.create(**ask)).choices[0]


async def streamed(checkpoint: Checkpoint, text: str, **fields: Any) -> list[dict[str, Any]]:
    """The choices of the chunks."""
    async with saying(checkpoint, text) as (rig, client):
        ask = {"model": rig.front.model, "messages": SAY, "tools": TOOLS, "stream": True} | fields
        chunks = [chunk async for chunk in await client.chat.completions.create(**ask)]
        return [choice.model_dump(exclude_unset=True) for chunk in chunks for choice in chunk.choices]


def added_up(choices: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]], str | None]:
    """Content, calls and finish reason of one streamed choice, as clients put them together."""
    content, calls = "", {}
    for choice in choices:
        content += choice["delta"].get("content") or ""
        for entry in choice["delta"].get("tool_calls", ()):
            call = calls.setdefault(entry["index"], {"name": "", "arguments": ""})
            call["name"] += entry["function"].get("name", "")
            call["arguments"] += entry["function"]["arguments"]
    return content, [(call["name"], call["arguments"]) for call in calls.values()], choices[-1]["finish_reason"]


async def test_a_call_is_whole(checkpoint):
    choice = await whole(checkpoint, CALL)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "get_weather", PARIS)
    assert call.id.startswith("call_")


async def test_a_streamed_call_begins_with_its_name_and_goes_on_with_its_arguments(checkpoint):
    choices = await streamed(checkpoint, TWO)
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    assert added_up(choices) == ("", [("get_weather", PARIS), ("now", "{}")], "tool_calls")
    entries = [entry for choice in choices for entry in choice["delta"].get("tool_calls", ())]
    for index in (0, 1):
        first, *others = [entry for entry in entries if entry["index"] == index]
        assert first["id"].startswith("call_") and first["type"] == "function"
        assert all(entry.keys() == {"index", "function"} for entry in others)
    assert len(entries) > 4, "arguments come piece by piece"
    assert all(choice["delta"] for choice in choices[:-1]), "nothing comes where there is nothing to tell"


async def test_words_before_a_call_are_content(checkpoint):
    choice = await whole(checkpoint, f"Let me look. {CALL}")
    assert choice.message.content == "Let me look. " and len(choice.message.tool_calls) == 1
    assert added_up(await streamed(checkpoint, f"Let me look. {CALL}"))[0] == "Let me look. "


@pytest.mark.parametrize("text", ["It is sunny in <Paris>.", "<tool_call>[{]", "<tool_call>", "a {b} [c]", CALL[:30]])
async def test_what_is_no_call_is_content(checkpoint, text):
    choice = await whole(checkpoint, text)
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    assert added_up(await streamed(checkpoint, text)) == (text, [], "stop")


async def test_a_broken_call_is_content_when_whole_and_ends_where_it_breaks_in_a_stream(checkpoint):
    text = '<tool_call>[{"name": "get_weather", "arguments": {"city": Paris}}]</tool_call>'
    choice = await whole(checkpoint, text)
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    _, calls, finish = added_up(await streamed(checkpoint, text))
    assert (calls, finish) == ([("get_weather", '{"city": ')], "stop")


async def test_a_call_that_is_cut_off_says_length(checkpoint, tokenizer):
    ids = tokenizer.encode(CALL).ids
    cut = next(count for count in range(len(ids)) if '"city' in tokenizer.decode(ids[:count]))
    choice = await whole(checkpoint, CALL, max_tokens=cut)
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "length")
    content, calls, finish = added_up(await streamed(checkpoint, CALL, max_tokens=cut))
    assert (content, finish) == ("", "length") and PARIS.startswith(calls[0][1]) and calls[0][1] != PARIS


@pytest.mark.parametrize(("in_parallel", "count"), [(None, 2), (True, 2), (False, 1)])
async def test_calls_come_one_at_a_time_if_asked(checkpoint, in_parallel, count):
    fields = {} if in_parallel is None else {"parallel_tool_calls": in_parallel}
    assert len((await whole(checkpoint, TWO, **fields)).message.tool_calls) == count
    assert len(added_up(await streamed(checkpoint, TWO, **fields))[1]) == count


async def test_a_call_too_many_that_breaks_is_content(checkpoint):
    text = TWO.replace("{}", "{now}")
    choice = await whole(checkpoint, text, parallel_tool_calls=False)
    content, calls, finish = added_up(await streamed(checkpoint, text, parallel_tool_calls=False))
    assert (content, calls, finish) == (choice.message.content, [("get_weather", PARIS)], "tool_calls")
    assert '"now"' in content


async def test_every_choice_has_its_own_calls(checkpoint):
    choices = await streamed(checkpoint, CALL, n=2, logprobs=True)
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert added_up(mine) == ("", [("get_weather", PARIS)], "tool_calls")
        tokens = [entry["token"] for choice in mine for entry in choice["logprobs"]["content"]]
        assert "".join(tokens) == CALL


class GetWeather(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    city: str


async def test_the_clients_own_helpers_make_objects_of_calls(checkpoint):
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    async with saying(checkpoint, CALL) as (rig, client):
        ask = {"model": rig.front.model, "messages": SAY, "tools": [tool]}
        reply = await client.chat.completions.parse(**ask)
        calls = reply.choices[0].message.tool_calls or []
        assert [call.function.parsed_arguments for call in calls] == [GetWeather(city="Paris")]
        assert rig.workers[0].jobs[0].sampling.grammar, "what the client says is strict is enforced"
        async with client.chat.completions.stream(**ask) as stream:
            kinds = [event.type async for event in stream]
            final = (await stream.get_final_completion()).choices[0]
        calls = final.message.tool_calls or []
        assert [call.function.parsed_arguments for call in calls] == [GetWeather(city="Paris")]
        assert final.message.content is None and final.finish_reason == "tool_calls"
        assert kinds.count("tool_calls.function.arguments.done") == 1


async def test_a_reply_with_calls_has_the_shape_that_is_described(checkpoint):
    async with saying(checkpoint, CALL) as (rig, _), rig.client() as http:
        reply = (await http.post("/v1/chat/completions", json={"messages": SAY, "tools": TOOLS})).json()
        assert msgspec.to_builtins(msgspec.convert(reply, ChatReply)) == reply
        assert reply["usage"]["completion_tokens"] == len(rig.workers[0].script)


async def test_a_template_that_knows_tools_is_given_them(checkpoint):
    async with saying(replace(checkpoint, chat_template=KNOWING), "hi") as (rig, client):
        shown = await prompt(rig, client, tools=[TOOLS[0] | {"function": WEATHER | {"strict": False}}, TOOLS[1]])
        assert shown == f"[TOOL_CALLS][ARGS]{json.dumps(TOOLS)}\nuser: weather?;"


async def test_a_template_that_knows_no_tools_has_them_told_in_words(checkpoint):
    async with saying(checkpoint, "hi") as (rig, client):
        shown = await prompt(rig, client, tools=TOOLS)
        assert shown.startswith("<|im_start|>system\n")
        assert f"<tools>{json.dumps(TOOLS)}</tools>" in shown
        assert '<tool_call>[{"name": "function_name", "arguments": {"argument": "value"}}]</tool_call>' in shown
        system = {"role": "system", "content": "Be brief."}
        shown = await prompt(rig, client, tools=TOOLS, messages=[system, *SAY])
        assert shown.startswith("<|im_start|>system\nBe brief.\n\n") and shown.count("<|im_start|>system") == 1


async def test_a_template_for_tools_alone_is_taken_where_there_are_tools(checkpoint):
    """Hermes 2 Pro and 3 have two: without tools the default one, which tells of earlier calls in words."""
    both = replace(checkpoint, tool_template=KNOWING.replace("[TOOL_CALLS][ARGS]", "<tool_call>"))
    async with saying(checkpoint, "hi") as (rig, client):
        plain = await prompt(rig, client)
    call = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    async with saying(both, call) as (rig, client):
        assert await prompt(rig, client) == await prompt(rig, client, tools=TOOLS, tool_choice="none") == plain
        assert await prompt(rig, client, tools=TOOLS) == f"<tool_call>{json.dumps(TOOLS)}\nuser: weather?;"
        assert '<tool_call>\n{"name": "get_weather"' in await prompt(rig, client, messages=HISTORY)
        ask = {"model": rig.front.model, "messages": SAY, "tools": TOOLS}
        choice = (await client.chat.completions.create(**ask)).choices[0]
        assert [made.function.arguments for made in choice.message.tool_calls or []] == [PARIS]


@pytest.mark.parametrize("template", ["{% if %}", "{{ %s }}" % ("(" * 5000 + "1" + ")" * 5000), "{{ 9 ** 9999 }}"])
def test_a_template_that_does_not_compile_is_told(checkpoint, template):
    """jinja's own words for what is wrong are only some of those that it fails with."""
    with pytest.raises(ConfigError, match="chat template does not compile"):
        Prompting(replace(checkpoint, tool_template=template))


SPELLED_OUT = """{% for tool in tools %}{{ tool.function.name + ": " + tool.function.description }}
{% for name, field in tool.function.parameters.properties | items %}{{ name }}{% endfor %}{% endfor %}<tool_call>
{{- messages[0].content }}"""
UNWRAPPED = SPELLED_OUT.replace("{{ tool", "{% set tool = tool.function %}{{ tool", 1).replace(
    "tool.function.", "tool."
)


@pytest.mark.parametrize("template", [SPELLED_OUT, UNWRAPPED])
@pytest.mark.parametrize("parser", ["auto", "hermes"])
@pytest.mark.parametrize("given", [{}, {"description": "when?"}, {"parameters": {"type": "object"}}])
def test_a_tool_needs_no_more_than_a_name_where_the_template_spells_it_out(checkpoint, given, parser, template):
    """The template of Hermes 2 Pro and 3 adds the description to other text."""
    prompting = Prompting(replace(checkpoint, tool_template=template), parser)
    body = {"messages": SAY, "tools": [{"type": "function", "function": {"name": "now"} | given}]}
    shown = prompting.render(msgspec.convert(body, ChatRequest))
    assert shown == f"now: {given.get('description', '')}\n<tool_call>weather?"


async def test_calls_and_their_results_are_shown_to_the_model(checkpoint):
    async with saying(checkpoint, "hi") as (rig, client):
        shown = await prompt(rig, client, messages=HISTORY)
        assert f"<|im_start|>assistant\n{CALL[:-13]}, {CALL[12:]}<|im_end|>" in shown
        results = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n</tool_response>"
        assert f"<|im_start|>user\n{results}<|im_end|>" in shown
    async with saying(replace(checkpoint, chat_template=KNOWING), "hi") as (rig, client):
        shown = await prompt(rig, client, messages=HISTORY)
        assert shown == "user: weather?;assistant: get_weatherParisget_weatherParis;tool: sunny;tool: rainy;"


async def test_with_tool_choice_none_the_model_does_not_hear_of_tools(checkpoint):
    async with saying(checkpoint, CALL) as (rig, client):
        assert await prompt(rig, client, tools=TOOLS, tool_choice="none") == await prompt(rig, client)
        ask = {"model": rig.front.model, "messages": SAY, "tools": TOOLS, "tool_choice": "none"}
        choice = (await client.chat.completions.create(**ask)).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_call_that_has_to_come_is_a_grammar_for_both_workers(checkpoint, choice):
    async with saying(checkpoint, '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>') as (rig, client):
        ask = {"model": rig.front.model, "messages": SAY, "tools": TOOLS, "tool_choice": choice}
        assert (await client.chat.completions.create(**ask)).choices[0].finish_reason == "tool_calls"
        grammars = {job.sampling.grammar for worker in rig.workers for job in worker.jobs}
        assert len(grammars) == 1 and "now" in grammars.pop()
        await prompt(rig, client, tools=TOOLS)
        assert rig.workers[0].jobs[0].sampling.grammar == ""


def with_markers(checkpoint: Checkpoint, *markers: str) -> Checkpoint:
    """Special tokens of their own for `markers`."""

    def build():
        tokenizer = deepcopy(checkpoint.tokenizer())
        tokenizer.add_special_tokens(list(markers))
        return tokenizer

    config = replace(checkpoint.config, vocab_size=checkpoint.config.vocab_size + len(markers))
    return replace(checkpoint, build_tokenizer=build, config=config, chat_template=KNOWING)


@pytest.mark.parametrize("skip", [None, True, False])
async def test_markers_are_seen_though_they_are_special_tokens(checkpoint, skip):
    special = with_markers(checkpoint, "[TOOL_CALLS]", "[ARGS]")
    text = f"Sure.<|im_start|>[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}"
    fields = {} if skip is None else {"extra_body": {"skip_special_tokens": skip}}
    choice = await whole(special, text, **fields)
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather", "now"]
    assert choice.message.content == ("Sure.<|im_start|>" if skip is False else "Sure.")
    assert all(len(call.id) == 9 and call.id.isalnum() for call in choice.message.tool_calls)
    content, calls, _ = added_up(await streamed(special, text, **fields))
    assert (content, calls) == (choice.message.content, [("get_weather", PARIS), ("now", "{}")])


async def test_a_special_marker_is_in_the_grammar_by_its_id(checkpoint):
    async with saying(with_markers(checkpoint, "[TOOL_CALLS]", "[ARGS]"), "x") as (rig, client):
        await prompt(rig, client, tools=TOOLS, tool_choice="required")
        token_id = rig.front.prompting.tokenizer.token_to_id("[TOOL_CALLS]")
        assert f"<[{token_id}]>" in rig.workers[0].jobs[0].sampling.grammar


async def test_an_unknown_form_is_refused_and_a_setting_names_one(checkpoint):
    unknown = replace(checkpoint, chat_template="{{ tools }}<function={{ messages[0].content }}")
    async with saying(unknown, "x") as (rig, _), rig.client() as http:
        reply = await http.post("/v1/chat/completions", json={"messages": SAY, "tools": TOOLS})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
        assert (await http.post("/v1/chat/completions", json={"messages": SAY})).status_code == 200
    llama = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
    async with saying(unknown, llama, tool_parser="llama3_json") as (rig, client):
        ask = {"model": rig.front.model, "messages": SAY, "tools": TOOLS}
        assert (await client.chat.completions.create(**ask)).choices[0].message.tool_calls


def test_the_setting_is_checked_at_the_start(monkeypatch):
    monkeypatch.setenv("TANDEM_TOOL_PARSER", "mistral")
    assert GatewaySettings().tool_parser == "mistral"  # pyright: ignore[reportCallIssue]
    monkeypatch.setenv("TANDEM_TOOL_PARSER", "nobodys")
    with pytest.raises(pydantic.ValidationError, match="tool_parser"):
        GatewaySettings()  # pyright: ignore[reportCallIssue]


def of(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | function}]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": "all"}, "tools"),
    ({"tools": {"type": "function"}}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
    (of(name="two words"), "tools[0].function.name"),
    (of(name=""), "tools[0].function.name"),
    (of(name="é"), "tools[0].function.name"),
    (of(name="f\n"), "tools[0].function.name"),
    (of(name="f" * 65), "tools[0].function.name"),
    (of(description=5), "tools[0].function.description"),
    (of(parameters="none"), "tools[0].function.parameters"),
    (of(parameters={"type": "array"}), "tools[0].function.parameters"),
    (of(strict="yes"), "tools[0].function.strict"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
    ({"tools": TOOLS * 600}, "tools"),
    (
        of(parameters={"properties": {"x": {"type": "no"}}}) | {"tool_choice": "required"},
        "tools[0].function.parameters",
    ),
    (of(parameters={"$ref": "#/nowhere"}) | {"tool_choice": "required"}, "tools[0].function.parameters"),
    (of(parameters={"properties": {"x": {"type": "no"}}}, strict=True), "tools[0].function.parameters"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": TOOLS, "tool_choice": {"type": "any", "function": {"name": "now"}}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "later"}}}, "tool_choice.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": [], "tool_choice": NAMED}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ({"tools": TOOLS, "tool_choice": NAMED, "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"functions": [WEATHER]}, "functions"),
    ({"function_call": {"name": "now"}}, "function_call"),
    ({"messages": [*SAY, {"role": "tool", "content": "sunny"}]}, "messages[1].tool_call_id"),
    ({"messages": [*SAY, {"role": "tool", "tool_call_id": "a"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [MADE]}]}, "messages[0].tool_calls"),
    ({"messages": [*SAY, {"role": "assistant", "tool_calls": "f()"}]}, "messages[1].tool_calls"),
    ({"messages": [*SAY, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[1].tool_calls[0].function"),
]


async def test_bad_input_is_refused_by_name_and_good_input_then_served(checkpoint):
    async with saying(checkpoint, CALL) as (rig, _), rig.client() as http:
        for fields, param in BAD:
            reply = await http.post("/v1/chat/completions", json={"messages": SAY, "max_tokens": 2} | fields)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), (fields, reply.text)
        assert rig.store.placed == []
        for messages in (HISTORY, [*SAY, {"role": "assistant", "content": "x", "tool_calls": []}, *SAY]):
            reply = await http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS})
            assert reply.status_code == 200, reply.text


async def test_a_streamed_call_that_was_cut_off_is_taken_back(checkpoint, tokenizer):
    ids = tokenizer.encode(CALL).ids
    cut = next(count for count in range(len(ids)) if '"Par' in tokenizer.decode(ids[:count]))
    _, [(name, arguments)], _ = added_up(await streamed(checkpoint, CALL, max_tokens=cut))
    assert arguments.startswith('{"city":') and not arguments.endswith("}")
    made = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    told = {"role": "tool", "tool_call_id": "call_1", "content": "it was cut off"}
    async with saying(checkpoint, "hi") as (rig, client):
        shown = await prompt(rig, client, messages=[*SAY, {"role": "assistant", "tool_calls": [made]}, told])
    assert '{"name": "get_weather", "arguments": {"city": "Par' in shown


@pytest.mark.parametrize("arguments", ["[]", "5", '"a"', '{"a": NaN}', '{"a": "\\ud800"}', "[" * 500, '{"a": Paris}'])
async def test_arguments_that_are_no_object_are_shown_as_they_are(checkpoint, arguments):
    """OpenAI says of them that a model does not always write valid JSON."""
    made = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    async with saying(checkpoint, "hi") as (rig, client):
        shown = await prompt(rig, client, messages=[*SAY, {"role": "assistant", "tool_calls": made}, *SAY])
    assert json.dumps({"raw": arguments}) in shown


async def test_completions_refuse_tools(checkpoint):
    async with saying(checkpoint, "x") as (rig, _), rig.client() as http:
        for fields in ({"tools": TOOLS}, {"tool_choice": "required"}):
            reply = await http.post("/v1/completions", json={"prompt": "a"} | fields)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, *fields)
        given = {"prompt": "a", "tools": [], "tool_choice": "auto"}
        assert (await http.post("/v1/completions", json=given)).status_code == 200


async def test_tools_count_when_a_conversation_is_tokenized(checkpoint):
    async with saying(checkpoint, "x") as (rig, client), rig.client() as http:
        reply = (await http.post("/tokenize", json={"messages": SAY, "tools": TOOLS})).json()
        await prompt(rig, client, tools=TOOLS)
        assert reply["tokens"] == rig.workers[0].jobs[0].token_ids


async def test_a_format_holds_for_an_answer_that_may_call_and_does_not(checkpoint):
    async with saying(checkpoint, "{}") as (rig, client):
        ask = {"model": rig.front.model, "messages": SAY, "tools": TOOLS, "response_format": {"type": "json_object"}}
        assert (await client.chat.completions.create(**ask)).choices[0].message.content == "{}"
        assert "get_weather" in rig.workers[0].jobs[0].sampling.grammar
        rig.workers[0].jobs.clear()
        ask["extra_body"] = {"response_format": None, "structured_outputs": {"json_object": True}}
        assert (await client.chat.completions.create(**ask)).choices[0].message.content == "{}"
        grammar = rig.workers[0].jobs[0].sampling.grammar
        assert grammar and "get_weather" not in grammar
