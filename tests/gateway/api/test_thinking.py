"""Models that think aloud, through openai-python and HTTP, with fake workers that answer what a model would."""

import functools
import json
from dataclasses import replace
from typing import Any

import msgspec
import openai
import pytest
from llguidance import LLTokenizer

from checkpoint import Checkpoint
from contracts.ids import WorkerId
from contracts.node import WorkerRole
from gateway.api.openapi import ChatReply, ResponseReply
from gateway.reasoning.harmony import Harmony
from testing.fake_worker import FakeWorker
from tests.gateway.accepted_text import is_accepted
from tests.gateway.gateway_rig import SECRET, pair
from tests.gateway.sayings import SAY, prompt, saying, with_specials
from tests.gateway.thinking_models import (
    ALWAYS,
    ANALYSIS,
    CHANNEL_CALL,
    CHANNELS,
    FINAL,
    HYBRID,
    PARAMETERS,
    PARIS,
    SAID,
    TAGGED,
    TAGGED_CALL,
    THOUGHT,
    TOOLS,
    added_up,
)

pytestmark = pytest.mark.slow

CITY = {"type": "json_schema", "json_schema": {"name": "city", "schema": PARAMETERS}}


@pytest.fixture(scope="module")
def hybrid(checkpoint):
    return replace(checkpoint, chat_template=HYBRID)


@pytest.fixture(scope="module")
def always(checkpoint):
    return replace(checkpoint, chat_template=ALWAYS)


@pytest.fixture(scope="module")
def special_tags(checkpoint):
    return with_specials(checkpoint, HYBRID, ("<think>", "</think>"))


@pytest.fixture(scope="module")
def plain_tags(checkpoint):
    return with_specials(checkpoint, HYBRID, (), ("<think>", "</think>", "<tool_call>", "</tool_call>"))


@pytest.fixture(scope="module")
def harmony(checkpoint):
    return with_specials(checkpoint, CHANNELS, Harmony.markers)


ANSWERS = [
    ("hybrid", TAGGED + SAID),
    ("always", TAGGED.removeprefix("<think>\n") + SAID),
    ("special_tags", TAGGED + SAID),
    ("plain_tags", TAGGED + SAID),
    ("harmony", ANALYSIS + FINAL + SAID),
]
CALLS = [("hybrid", TAGGED + TAGGED_CALL), ("plain_tags", TAGGED + TAGGED_CALL), ("harmony", ANALYSIS + CHANNEL_CALL)]


async def whole(checkpoint: Checkpoint, text: str, **fields: Any) -> dict[str, Any]:
    async with saying(checkpoint, text) as (rig, client):
        ask = {"model": rig.front.model, "messages": SAY} | fields
        return (await client.chat.completions.create(**ask)).model_dump()


async def deltas(checkpoint: Checkpoint, text: str, in_characters: bool = False, **fields: Any) -> list[dict[str, Any]]:
    """The choices of the chunks."""
    async with saying(checkpoint, text, in_characters) as (rig, client):
        ask = {"model": rig.front.model, "messages": SAY, "stream": True} | fields
        chunks = [chunk async for chunk in await client.chat.completions.create(**ask)]
        return [choice.model_dump(exclude_unset=True) for chunk in chunks for choice in chunk.choices]


@pytest.mark.parametrize(("model", "text"), ANSWERS)
async def test_reasoning_is_apart_from_the_answer(request, model, text):
    reply = await whole(request.getfixturevalue(model), text)
    (choice,) = reply["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (THOUGHT, SAID)
    assert (choice["message"]["reasoning_content"], choice["finish_reason"]) == (THOUGHT, "stop")
    assert "tool_calls" not in choice["message"] or choice["message"]["tool_calls"] is None


@pytest.mark.parametrize("in_characters", [False, True])
@pytest.mark.parametrize(("model", "text"), ANSWERS)
async def test_a_stream_says_the_same_in_order(request, model, text, in_characters):
    choices = await deltas(request.getfixturevalue(model), text, in_characters)
    assert [added_up(choices, name) for name in ("reasoning", "reasoning_content", "content")] == [
        THOUGHT,
        THOUGHT,
        SAID,
    ]
    kinds = [kind for choice in choices for kind in ("reasoning", "content") if choice["delta"].get(kind)]
    assert kinds == sorted(kinds, reverse=True) and kinds.count("reasoning") > 2 and kinds.count("content") > 2
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    assert choices[-1]["finish_reason"] == "stop"
    assert all(choice["delta"] for choice in choices[:-1]), "nothing comes where there is nothing to tell"


@pytest.mark.parametrize(("model", "text"), ANSWERS)
async def test_reasoning_is_left_out_if_asked(request, model, text):
    checkpoint, extra = request.getfixturevalue(model), {"include_reasoning": False}
    reply = await whole(checkpoint, text, extra_body=extra)
    message = reply["choices"][0]["message"]
    assert message["content"] == SAID and "reasoning" not in message and "reasoning_content" not in message
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    choices = await deltas(checkpoint, text, extra_body=extra)
    assert (added_up(choices, "reasoning"), added_up(choices, "content")) == ("", SAID)
    assert all(choice["delta"] for choice in choices[:-1])


@pytest.mark.parametrize(("model", "text"), ANSWERS)
async def test_the_tokens_of_reasoning_are_counted(request, model, text):
    """Those between what begins it and what ends it; characters of several tokens are not in it."""
    checkpoint = request.getfixturevalue(model)
    async with saying(checkpoint, text) as (rig, client):
        ask = {"model": rig.front.model, "messages": SAY, "stream": True}
        options = {"include_usage": True, "continuous_usage_stats": True}
        usages = [chunk.usage async for chunk in await client.chat.completions.create(**ask, stream_options=options)]
        wrapped = f"\n{THOUGHT}\n" if model != "harmony" else THOUGHT
        expected = len(rig.front.prompting.tokenizer.encode(wrapped, add_special_tokens=False).ids)
        counts = [usage.completion_tokens_details.reasoning_tokens for usage in usages]
        assert counts == sorted(counts) and abs(counts[-1] - expected) <= 2
        assert usages[-1].completion_tokens == len(rig.workers[0].script)
        reply = await client.chat.completions.create(**ask | {"stream": False})
        assert reply.usage == usages[-1]


@pytest.mark.parametrize("model", ["special_tags", "plain_tags"])
async def test_the_tokens_of_a_tag_that_is_one_token_are_no_reasoning(request, model):
    checkpoint = request.getfixturevalue(model)
    reply = await whole(checkpoint, TAGGED + SAID)
    tokenizer = checkpoint.tokenizer()
    expected = len(tokenizer.encode(f"\n{THOUGHT}\n", add_special_tokens=False).ids)
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == expected


@pytest.mark.parametrize(("model", "text"), ANSWERS)
async def test_an_answer_cut_off_in_thought_has_no_content(request, model, text):
    checkpoint = request.getfixturevalue(model)
    ids = checkpoint.tokenizer().encode(text[: text.index(" the" if " the" in text else "\nthe")]).ids
    reply = await whole(checkpoint, text, max_tokens=len(ids))
    (choice,) = reply["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    assert choice["message"]["reasoning"] and THOUGHT.startswith(choice["message"]["reasoning"])
    choices = await deltas(checkpoint, text, max_tokens=len(ids))
    assert added_up(choices, "reasoning") == choice["message"]["reasoning"]
    assert (added_up(choices, "content"), choices[-1]["finish_reason"]) == ("", "length")


@pytest.mark.parametrize(("model", "text"), CALLS)
async def test_a_call_after_reasoning_is_a_call(request, model, text):
    checkpoint = request.getfixturevalue(model)
    (choice,) = (await whole(checkpoint, text, tools=TOOLS))["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"], choice["finish_reason"]) == (THOUGHT, None, "tool_calls")
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "get_weather", "arguments": PARIS}
    choices = await deltas(checkpoint, text, in_characters=True, tools=TOOLS)
    entries = [entry for choice in choices for entry in choice["delta"].get("tool_calls", ())]
    assert entries[0]["function"]["name"] == "get_weather" and {entry["index"] for entry in entries} == {0}
    assert "".join(entry["function"]["arguments"] for entry in entries) == PARIS and len(entries) > 4
    assert (added_up(choices, "reasoning"), added_up(choices, "content")) == (THOUGHT, "")
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("name", ["reasoning", "tool_calls"])
@pytest.mark.parametrize(("model", "text"), [CALLS[0], CALLS[-1]])
async def test_an_answer_whose_worker_dies_in_thought_or_in_a_call_goes_on_there(request, model, text, name):
    checkpoint = request.getfixturevalue(model)
    workers = [*pair(period_s=0.01), FakeWorker(WorkerId("d1"), WorkerRole.DECODE, SECRET, period_s=0.01)]
    async with saying(checkpoint, text, workers=workers) as (rig, client):
        ask = {"model": rig.front.model, "messages": SAY, "tools": TOOLS, "stream": True}
        ask |= {"stream_options": {"include_usage": True}}
        choices, usage, is_lost = [], None, False
        async for chunk in await client.chat.completions.create(**ask):
            choices += [choice.model_dump(exclude_unset=True) for choice in chunk.choices]
            usage = chunk.usage or usage
            if not is_lost and len([choice for choice in choices if choice["delta"].get(name)]) == 3:
                is_lost = True
                await workers[1].stop()
        entries = [entry for choice in choices for entry in choice["delta"].get("tool_calls", ())]
        assert [entry["function"]["name"] for entry in entries if "id" in entry] == ["get_weather"]
        assert "".join(entry["function"]["arguments"] for entry in entries) == PARIS
        assert (added_up(choices, "reasoning"), added_up(choices, "content")) == (THOUGHT, "")
        assert choices[-1]["finish_reason"] == "tool_calls" and rig.front.dispatch.num_replays == 1
        whole = await client.chat.completions.create(**{k: ask[k] for k in ("model", "messages", "tools")})
        assert usage == whole.usage


async def test_a_call_in_thought_is_none(hybrid):
    (choice,) = (await whole(hybrid, f"<think>{TAGGED_CALL}</think>No.", tools=TOOLS))["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (TAGGED_CALL, "No.")
    assert (choice["message"]["tool_calls"], choice["finish_reason"]) == (None, "stop")


async def test_what_a_client_without_tools_calls_is_not_told_as_a_call(harmony):
    (choice,) = (await whole(harmony, ANALYSIS + CHANNEL_CALL))["choices"]
    assert (choice["message"]["tool_calls"], choice["message"]["content"]) == (None, None)
    assert choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off_before_its_arguments_is_none(harmony):
    """Nothing but a call that ended by itself has no arguments."""
    text = CHANNEL_CALL.removesuffix(PARIS)
    num_tokens = len(harmony.tokenizer().encode(text, add_special_tokens=False).ids)
    for max_tokens, arguments, finish in ((num_tokens, "", "length"), (None, "{}", "tool_calls")):
        choices = await deltas(harmony, text, tools=TOOLS, max_completion_tokens=max_tokens)
        entries = [entry for choice in choices for entry in choice["delta"].get("tool_calls", ())]
        assert "".join(entry["function"]["arguments"] for entry in entries) == arguments
        assert choices[-1]["finish_reason"] == finish
        (choice,) = (await whole(harmony, text, tools=TOOLS, max_completion_tokens=max_tokens))["choices"]
        assert choice["finish_reason"] == finish
        assert bool(choice["message"]["tool_calls"]) == (finish == "tool_calls")


async def test_a_model_that_does_not_think_this_time_says_null(hybrid):
    (choice,) = (await whole(hybrid, SAID))["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (None, SAID)
    (choice,) = (await whole(hybrid, f"<think>\n\n</think>\n\n{SAID}"))["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (None, SAID)


async def test_a_model_that_knows_no_reasoning_has_no_such_field(checkpoint):
    reply = await whole(checkpoint, "<think>x</think>y")
    assert reply["choices"][0]["message"]["content"] == "<think>x</think>y"
    assert "reasoning" not in reply["choices"][0]["message"]
    assert reply["usage"].get("completion_tokens_details") is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("model", "text"), ANSWERS)
async def test_completions_stay_raw(request, model, text, stream):
    checkpoint = request.getfixturevalue(model)
    async with saying(checkpoint, text) as (rig, client):
        reply = await client.completions.create(model=rig.front.model, prompt="a", max_tokens=500, stream=stream)
        said = "".join([chunk.choices[0].text async for chunk in reply]) if stream else reply.choices[0].text
        assert said == rig.front.prompting.tokenizer.decode(rig.workers[0].script)


@pytest.mark.parametrize(("model", "text"), ANSWERS)
async def test_every_choice_tells_all_its_tokens(request, model, text):
    extra = {"return_token_ids": True, "include_reasoning": False}
    choices = await deltas(request.getfixturevalue(model), text, n=2, logprobs=True, extra_body=extra)
    script = request.getfixturevalue(model).tokenizer().encode(text, add_special_tokens=False).ids
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert added_up(mine, "content") == SAID
        assert [i for choice in mine for i in choice.get("token_ids", ())] == script
        assert sum(len(choice["logprobs"]["content"]) for choice in mine if choice["logprobs"]) == len(script)


async def test_a_stop_string_holds_for_thought_too_but_is_in_no_marker(harmony, hybrid):
    for model, text in ((harmony, ANALYSIS + FINAL + SAID), (hybrid, TAGGED + SAID)):
        (choice,) = (await whole(model, text, stop=["the"]))["choices"]
        assert (choice["message"]["reasoning"].rstrip("\n"), choice["message"]["content"]) == ("We need", None)
        assert choice["finish_reason"] == "stop"
    for stop in (["|", "<", ">a", "<|end|><|start|>"], ["analysis", "final", "assistant"]):
        (choice,) = (await whole(harmony, ANALYSIS + FINAL + SAID, stop=stop))["choices"]
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == (THOUGHT, SAID)


@pytest.mark.parametrize("skips", [True, False])
async def test_words_about_harmony_are_no_harmony(harmony, skips):
    """Its markers are tokens. The same characters in other tokens are what a model says when it is asked about them."""
    about = f"It goes {FINAL}hi<|end|>, or {CHANNEL_CALL}<|call|>."
    async with saying(harmony, "") as (rig, client):
        tokenizer = rig.front.prompting.tokenizer
        spelled = [i for character in about for i in tokenizer.encode(character, add_special_tokens=False).ids]
        script = [*tokenizer.encode(FINAL, add_special_tokens=False).ids, *spelled]
        for worker in rig.workers:
            worker.script = script
        ask = {"model": rig.front.model, "messages": SAY, "tools": TOOLS, "extra_body": {"skip_special_tokens": skips}}
        (choice,) = (await client.chat.completions.create(**ask)).choices
        assert (choice.message.content, choice.message.reasoning, choice.message.tool_calls) == (about, None, None)


async def test_a_reply_has_the_shape_that_is_described(harmony):
    async with (
        saying(harmony, ANALYSIS + CHANNEL_CALL) as (rig, _),
        rig.client() as http,
    ):
        for fields in ({"tools": TOOLS}, {}, {"include_reasoning": False}):
            reply = (await http.post("/v1/chat/completions", json={"messages": SAY} | fields)).json()
            assert msgspec.to_builtins(msgspec.convert(reply, ChatReply)) == reply


async def test_effort_goes_to_the_template(harmony, hybrid):
    async with saying(harmony, "x") as (rig, client):
        assert "Reasoning: medium" in await prompt(rig, client)
        assert "Reasoning: high" in await prompt(rig, client, reasoning_effort="high")
        with pytest.raises(openai.BadRequestError, match="low, medium, high"):
            await prompt(rig, client, reasoning_effort="none")
    async with saying(hybrid, "x") as (rig, client):
        assert await prompt(rig, client, reasoning_effort="low") == await prompt(rig, client)
        off = await prompt(rig, client, reasoning_effort="none")
        assert off.endswith("<think>\n\n</think>\n\n")
        assert off == await prompt(rig, client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        both = {"reasoning_effort": "high", "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
        assert await prompt(rig, client, **both) == off


async def test_effort_changes_nothing_where_nothing_takes_it(checkpoint, always, harmony):
    own = replace(always, chat_template="{% set enable_thinking = true %}{{ enable_thinking }}" + ALWAYS)
    for model in (checkpoint, always, own):
        async with saying(model, "x") as (rig, _), rig.client() as http:
            for path, body, effort in (
                ("/v1/chat/completions", {"messages": SAY}, {"reasoning_effort": "low"}),
                ("/v1/responses", {"input": SAY}, {"reasoning": {"effort": "low"}}),
            ):
                rig.workers[0].jobs.clear()
                replies = [await http.post(path, json=body | fields) for fields in ({}, effort)]
                assert [reply.status_code for reply in replies] == [200, 200]
                plain, low = rig.workers[0].jobs
                assert plain.token_ids == low.token_ids
    async with saying(harmony, "x") as (rig, _), rig.client() as http:
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": SAY})):
            reply = await http.post(path, json=body | {"reasoning_effort": "huge"})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "reasoning_effort")


async def test_a_tool_needs_no_description_though_the_template_wants_one(harmony):
    async with saying(harmony, "x") as (rig, client):
        assert "// \ntype get_weather" in await prompt(rig, client, tools=TOOLS)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_earlier_reasoning_goes_to_the_template_as_it_knows_it(checkpoint, hybrid, harmony, name):
    said = [*SAY, {"role": "assistant", "content": "Sunny.", name: "Hm."}, *SAY]
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
    called = [*SAY, {"role": "assistant", "content": "I look.", name: "Hm.", "tool_calls": [call]}]
    async with saying(hybrid, "x") as (rig, client):
        assert "<think>Hm.</think>Sunny." in await prompt(rig, client, messages=said)
        assert "<think>Hm.</think>I look.<tool_call>get_weather" in await prompt(rig, client, messages=called)
        user = [{"role": "user", "content": "hi", name: "Hm."}]
        assert "Hm." not in await prompt(rig, client, messages=user)
    async with saying(harmony, "x") as (rig, client):
        shown = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Sunny."
        assert shown in await prompt(rig, client, messages=said)
        assert "<|message|>Hm.\n\nI look.<|end|>" in await prompt(rig, client, messages=called)
        assert "analysis" not in await prompt(rig, client, messages=[*SAY, {"role": "assistant", "content": "x"}, *SAY])
    async with saying(checkpoint, "x") as (rig, client):
        assert "Hm." not in await prompt(rig, client, messages=said)


async def test_an_answer_that_goes_on_goes_on_where_it_was(harmony, hybrid):
    fields = {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}}
    said = [*SAY, {"role": "assistant", "content": "It is"}]
    (choice,) = (await whole(harmony, " sunny.<|end|>", messages=said, **fields))["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (None, " sunny.")
    thinking = [*SAY, {"role": "assistant", "content": "<think>We"}]
    (choice,) = (await whole(hybrid, " need.</think>Yes.", messages=thinking, **fields))["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (" need.", "Yes.")
    asking = [{"role": "user", "content": "What does <think>"}]
    (choice,) = (await whole(hybrid, " mean?", messages=asking, **fields))["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (None, " mean?")


async def test_what_ends_an_answer_of_harmony_is_told_to_the_workers(harmony):
    async with saying(harmony, "x") as (rig, client):
        ends = {rig.front.prompting.tokenizer.token_to_id(text) for text in ("<|call|>", "<|return|>")}
        await prompt(rig, client, extra_body={"stop_token_ids": [7]})
        assert set(rig.workers[0].jobs[0].sampling.stop_token_ids) == {7, *ends}
        await prompt(rig, client, extra_body={"ignore_eos": True})
        assert rig.workers[0].jobs[0].sampling.stop_token_ids == ()


@functools.lru_cache(maxsize=8)
def wrapped(checkpoint: Checkpoint) -> LLTokenizer:
    return LLTokenizer(checkpoint.tokenizer().to_str(), eos_token=list(checkpoint.eos_token_ids))


def accepts(checkpoint: Checkpoint, grammar: str, text: str) -> bool:
    """The grammar takes the text to its end, and may end there."""
    return is_accepted(wrapped(checkpoint), checkpoint.tokenizer(), grammar, text)


async def grammar(checkpoint: Checkpoint, **fields: Any) -> str:
    async with saying(checkpoint, "x") as (rig, client):
        await prompt(rig, client, **fields)
        return rig.workers[0].jobs[0].sampling.grammar


@pytest.mark.parametrize(
    "wanted",
    [
        {"response_format": CITY},
        {"extra_body": {"structured_outputs": {"json": PARAMETERS}}},
        {"extra_body": {"structured_outputs": {"choice": [PARIS, "no"]}}},
        {"extra_body": {"structured_outputs": {"regex": r'\{"city":"[A-Z][a-z]+"\}'}}},
        {"extra_body": {"structured_outputs": {"grammar": f"start: {json.dumps(PARIS)}"}}},
        {"response_format": CITY, "tools": TOOLS},
    ],
)
@pytest.mark.parametrize(("model", "text"), ANSWERS)
async def test_a_grammar_holds_for_the_answer_and_leaves_the_reasoning_free(request, model, text, wanted):
    checkpoint = request.getfixturevalue(model)
    given = await grammar(checkpoint, **wanted)
    before = text.removesuffix(SAID)
    assert accepts(checkpoint, given, before + PARIS)
    assert not accepts(checkpoint, given, before + SAID)
    assert not accepts(checkpoint, given, before) and not accepts(checkpoint, given, SAID)
    alone = FINAL + PARIS if model == "harmony" else PARIS
    assert accepts(checkpoint, given, alone) == (model != "always"), "who is in thought has to end it first"


@pytest.mark.parametrize(("model", "text"), CALLS)
async def test_a_call_that_has_to_come_may_come_after_reasoning(request, model, text):
    checkpoint = request.getfixturevalue(model)
    given = await grammar(checkpoint, tools=TOOLS, tool_choice="required")
    spaced = text.replace('":"', '": "')
    assert accepts(checkpoint, given, spaced)
    assert not accepts(checkpoint, given, spaced.replace("city", "town"))
    assert not accepts(checkpoint, given, spaced.replace("get_weather", "get_whether"))
    either = await grammar(checkpoint, tools=TOOLS, response_format=CITY)
    said = ANALYSIS + FINAL if model == "harmony" else TAGGED
    assert accepts(checkpoint, either, text.replace('":"', '": "')) and accepts(checkpoint, either, said + PARIS)
    assert not accepts(checkpoint, either, said + SAID)


@pytest.mark.parametrize("model", ["hybrid", "always", "special_tags", "plain_tags"])
async def test_strict_arguments_hold_behind_reasoning_that_is_free(request, model):
    checkpoint = request.getfixturevalue(model)
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    given = await grammar(checkpoint, tools=strict)
    call = TAGGED_CALL.replace('":"', '": "')
    thought = TAGGED.removeprefix("<think>\n") if model == "always" else TAGGED
    for text in (SAID, call, f"I look.\n{call}", f"{call}\n{call}"):
        assert accepts(checkpoint, given, thought + text)
        assert accepts(checkpoint, given, text) or model == "always"
    assert not accepts(checkpoint, given, thought + call.replace("city", "town"))
    assert not accepts(checkpoint, given, f"{thought}I look.\n{call.replace('city', 'town')}")


async def test_strict_arguments_hold_in_a_model_whose_messages_have_headers(harmony):
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    given = await grammar(harmony, tools=strict)
    call = ANALYSIS + CHANNEL_CALL.replace('":"', '": "')
    told = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    assert accepts(harmony, given, call) and accepts(harmony, given, ANALYSIS + FINAL + SAID)
    assert accepts(harmony, given, told + call) and not accepts(harmony, given, call.replace("city", "town"))
    assert not await grammar(harmony, tools=TOOLS)


async def test_nothing_comes_before_a_grammar_where_an_answer_goes_on(harmony):
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    said = [*SAY, {"role": "assistant", "content": "City: "}]
    given = await grammar(harmony, messages=said, response_format=CITY, extra_body=fields)
    assert accepts(harmony, given, PARIS) and not accepts(harmony, given, FINAL + PARIS)


WITHOUT_THOUGHT: list[dict[str, Any]] = [
    {"reasoning_effort": "none"},
    {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    {
        "messages": [*SAY, {"role": "assistant", "content": "City: "}],
        "extra_body": {"continue_final_message": True, "add_generation_prompt": False},
    },
]


@pytest.mark.parametrize("off", WITHOUT_THOUGHT)
@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("tags", [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")])
async def test_a_grammar_holds_from_the_first_token_where_the_thought_is_over(checkpoint, tags, is_special, off):
    opening, closing = tags
    template = HYBRID.replace("<think>", opening).replace("</think>", closing)
    model = with_specials(checkpoint, template, tags if is_special else ())
    thought = f"{opening}\nHm.\n{closing}\n\n"
    given = await grammar(model, response_format=CITY, **off)
    assert accepts(model, given, PARIS) and not accepts(model, given, thought + PARIS)
    required = await grammar(model, tools=TOOLS, tool_choice="required", **off)
    call = TAGGED_CALL.replace('":"', '": "')
    assert accepts(model, required, call) and not accepts(model, required, thought + call)
    message = (await whole(model, thought + SAID, **off))["choices"][0]["message"]
    assert (message["reasoning"], message["content"].endswith(thought + SAID)) == (None, True)


async def test_completions_have_a_grammar_from_their_first_token(hybrid):
    async with saying(hybrid, "x") as (rig, client):
        await client.completions.create(model=rig.front.model, prompt="a", extra_body={"response_format": CITY})
        given = rig.workers[0].jobs[0].sampling.grammar
        assert accepts(hybrid, given, PARIS) and not accepts(hybrid, given, TAGGED + PARIS)


@pytest.mark.parametrize(("model", "text"), ANSWERS)
async def test_a_response_has_its_reasoning_as_an_item_before_the_message(request, model, text):
    async with saying(request.getfixturevalue(model), text) as (rig, client):
        reply = await client.responses.create(model=rig.front.model, input="weather?")
        thought, message = reply.output
        assert (thought.type, [part.text for part in thought.content]) == ("reasoning", [THOUGHT])
        assert (message.type, reply.output_text, reply.status) == ("message", SAID, "completed")
        assert thought.id.startswith("rs_") and thought.summary == [] and thought.status == "completed"
        assert 0 < reply.usage.output_tokens_details.reasoning_tokens < reply.usage.output_tokens
        raw = await client.responses.with_raw_response.create(model=rig.front.model, input="weather?")
        described = msgspec.json.decode(raw.content, type=ResponseReply).output
        assert [type(item).__name__ for item in described] == ["OutputReasoning", "OutputMessage"]
        assert msgspec.to_builtins(described) == json.loads(raw.content)["output"]


@pytest.mark.parametrize(("model", "text"), ANSWERS)
async def test_a_response_streams_one_item_after_the_other(request, model, text):
    async with saying(request.getfixturevalue(model), text, in_characters=True) as (rig, client):
        stream = await client.responses.create(model=rig.front.model, input="weather?", stream=True)
        events = [event async for event in stream]
    kinds = [event.type.removeprefix("response.") for event in events]
    runs = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    item = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    items = [kind.format(name) for name in ("reasoning_text", "output_text") for kind in item]
    assert runs == ["created", "in_progress", *items, "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for index, (kind, told) in enumerate([("reasoning_text", THOUGHT), ("output_text", SAID)]):
        deltas = [event for event in events if event.type == f"response.{kind}.delta"]
        assert "".join(event.delta for event in deltas) == told and len(deltas) > 2
        assert {(event.output_index, event.item_id) for event in deltas} == {
            (index, events[-1].response.output[index].id)
        }
    assert events[-1].response.output[0].content[0].text == THOUGHT and events[-1].response.output_text == SAID


async def test_each_message_of_a_response_is_an_item_and_no_more_than_was_said(harmony):
    look, hm = "<|channel|>commentary<|message|>I look.", "<|channel|>analysis<|message|>Hm."
    text = "<|end|><|start|>assistant".join([look, hm, hm, f"{FINAL}Sunny."])
    async with saying(harmony, text) as (rig, client):
        reply = await client.responses.create(model=rig.front.model, input="weather?")
        told = [("message", "I look."), ("reasoning", "Hm."), ("reasoning", "Hm."), ("message", "Sunny.")]
        assert [(item.type, item.content[0].text) for item in reply.output] == told
        assert len({item.id for item in reply.output}) == 4
        stream = await client.responses.create(model=rig.front.model, input="weather?", stream=True)
        last = [event async for event in stream][-1]
        assert [item.content for item in last.response.output] == [item.content for item in reply.output]
        said = [{"role": "user", "content": "weather?"}, *(item.model_dump() for item in reply.output)]
        rig.workers[0].jobs.clear()
        await client.responses.create(model=rig.front.model, input=said)
        shown = rig.front.prompting.tokenizer.decode(rig.workers[0].jobs[0].token_ids, skip_special_tokens=False)
        assert f"{FINAL}I look.<|end|><|start|>assistant{hm}\nHm.<|end|><|start|>assistant{FINAL}Sunny." in shown


async def test_a_response_that_is_cut_off_in_thought_has_no_message(always):
    async with saying(always, TAGGED.removeprefix("<think>\n")) as (rig, client):
        reply = await client.responses.create(model=rig.front.model, input="weather?", max_output_tokens=2)
        assert [(item.type, item.status) for item in reply.output] == [("reasoning", "incomplete")]
        assert (reply.status, reply.output_text) == ("incomplete", "")


async def test_a_response_takes_its_own_reasoning_back_and_an_effort(harmony):
    async with saying(harmony, ANALYSIS + FINAL + SAID) as (rig, client):
        ask = {"model": rig.front.model, "reasoning": {"effort": "low", "summary": "auto"}}
        first = await client.responses.create(input="weather?", **ask)
        assert first.reasoning.effort == "low"
        said = [{"role": "user", "content": "weather?"}, *(item.model_dump() for item in first.output)]
        rig.workers[0].jobs.clear()
        await client.responses.create(input=[*said, {"role": "user", "content": "really?"}], **ask)
        shown = rig.front.prompting.tokenizer.decode(rig.workers[0].jobs[0].token_ids, skip_special_tokens=False)
        assert "Reasoning: low" in shown and f"{ANALYSIS}{FINAL}{SAID}<|end|>" in shown


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "reasoning", "content": "Hm."}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]}, "input[0].content"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"input": "a", "reasoning_effort": "low"}, "reasoning_effort"),
        ({"input": "a", "include_reasoning": False}, "include_reasoning"),
    ],
)
async def test_what_a_response_cannot_do_is_named(harmony, fields, param):
    async with saying(harmony, "x") as (rig, _), rig.client() as http:
        reply = await http.post("/v1/responses", json=fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
