"""openai-python against the whole system with the real model."""

import asyncio
import concurrent.futures
import json
import re
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest

from bench.system.local_system import System
from bench.system.resource_usage import read

pytestmark = pytest.mark.slow

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(system: System):
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(client) -> str:
    return client.models.list().data[0].id


def test_the_model_is_listed(client, model):
    assert model == "SmolLM2-135M-Instruct"
    assert client.models.retrieve(model).id == model


def test_a_chat_is_answered(client, model):
    reply = client.chat.completions.create(model=model, messages=FRANCE, temperature=0)
    assert "Paris" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_stream_says_the_same_and_ends_with_usage(client, model):
    ask = {"model": model, "messages": FRANCE, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_the_same_prompt_again_is_a_prefix_hit(client, model):
    ask = {
        "model": model,
        "prompt": "The quick brown fox jumps over the lazy dog. " * 12,
        "max_tokens": 4,
        "temperature": 0,
    }
    first, second = (client.completions.create(**ask) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    assert second.usage.prompt_tokens_details.cached_tokens >= 96


def test_stop_cuts_before_the_string(client, model):
    ask = {"model": model, "prompt": "1, 2, 3, 4, 5, 6,", "max_tokens": 24, "temperature": 0}
    free = client.completions.create(**ask).choices[0]
    stopped = client.completions.create(**ask, stop=["9"]).choices[0]
    assert "9" in free.text
    assert stopped.text == free.text[: free.text.index("9")] and stopped.finish_reason == "stop"


def test_n_choices_differ_and_a_seed_repeats_them(client, model):
    ask = {"model": model, "prompt": "Once upon a time", "max_tokens": 12, "n": 3, "seed": 7, "temperature": 1.0}
    first, second = (client.completions.create(**ask) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in second.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]


def test_logprobs_line_up_across_the_handoff(client, model):
    reply = client.chat.completions.create(
        model=model, messages=FRANCE, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2
    )
    content = reply.choices[0].logprobs.content
    assert "".join(token.token for token in content) == reply.choices[0].message.content
    for token in content:
        assert token.logprob <= 0
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)


def test_max_tokens_1_is_for_the_prefill_worker_alone(client, model, system):
    def taken() -> dict[str, float]:
        return {node["role"]: read(node["url"])["tandem_worker_jobs_taken_total", ""] for node in system.workers()}

    before = taken()
    reply = client.completions.create(model=model, prompt="Hello", max_tokens=1, temperature=0)
    assert reply.usage.completion_tokens == 1 and reply.choices[0].finish_reason == "length"
    assert taken() == before | {"prefill": before["prefill"] + 1}


def test_errors_have_the_shape_that_clients_know(client, model):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=FRANCE)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=model, messages=FRANCE, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.completions.create(model=model, prompt=[1] * 9000, max_tokens=10)


async def test_async_whole_and_streamed_at_once(system, model):
    ask = {"model": model, "messages": FRANCE, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        whole, stream = await asyncio.gather(
            client.chat.completions.create(**ask), client.chat.completions.create(**ask, stream=True)
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert "Paris" in text and text == whole.choices[0].message.content


def test_twenty_at_once_each_get_their_own_answer(client, model):
    def ask(number: int) -> str:
        prompt = f"The number is {number}. The number is"
        return client.completions.create(model=model, prompt=prompt, max_tokens=3, temperature=0).choices[0].text

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(20, 40)))
    assert answers == [ask(number) for number in range(20, 40)]
    assert sum(str(number) in answer for number, answer in zip(range(20, 40), answers, strict=True)) >= 15


class Capital(pydantic.BaseModel):
    model_config = {"extra": "forbid"}
    city: str = pydantic.Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]
    is_large: bool


def test_a_parsed_answer_is_what_its_class_says(client, model):
    """Token 0 comes from prefill, the rest from decode: the grammar goes on where it stopped."""
    reply = client.chat.completions.parse(model=model, messages=FRANCE, response_format=Capital, temperature=0)
    capital = reply.choices[0].message.parsed
    assert isinstance(capital, Capital) and reply.choices[0].finish_reason == "stop"


def test_a_regex_and_a_choice_are_obeyed_in_a_stream(client, model):
    ask = {"model": model, "messages": FRANCE, "stream": True, "temperature": 1.0, "seed": 3}
    for outputs, pattern in [({"regex": "[A-Z][a-z]{2,8}!"}, "[A-Z][a-z]{2,8}!"), ({"choice": ["a", "b c"]}, "a|b c")]:
        chunks = client.chat.completions.create(**ask, extra_body={"structured_outputs": outputs})
        assert re.fullmatch(pattern, "".join(chunk.choices[0].delta.content or "" for chunk in chunks))


def test_bad_words_and_allowed_tokens_are_obeyed(client, model):
    ask = {"model": model, "messages": FRANCE, "temperature": 0, "max_tokens": 16}
    assert (
        "Paris"
        not in client.chat.completions.create(**ask, extra_body={"bad_words": ["Paris"]}).choices[0].message.content
    )
    only = client.chat.completions.create(**ask, extra_body={"allowed_token_ids": [20]}, logprobs=True)
    assert len({token.token for token in only.choices[0].logprobs.content}) == 1


TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "by": {"enum": ["train", "plane"]},
    },
    "required": ["city", "days", "by"],
    "additionalProperties": False,
}
CAPITAL = {"type": "object", "properties": {"country": {"type": "string", "maxLength": 20}}, "required": ["country"]}
TOOLS = [
    {"type": "function", "function": {"name": "plan_trip", "description": "Plan a trip.", "parameters": TRIP}},
    {"type": "function", "function": {"name": "capital_of", "parameters": CAPITAL | {"additionalProperties": False}}},
]
NAMED = {"type": "function", "function": {"name": "plan_trip"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_has_to_come_comes_and_obeys_its_schema(client, model, choice):
    """Token 0 comes from prefill, the rest from decode; whole and streamed are the same call."""
    ask = {"model": model, "messages": FRANCE, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    ask |= {"temperature": 0, "max_tokens": 120}
    whole = client.chat.completions.create(**ask).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls
    assert choice == "required" or call.function.name == "plan_trip"
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
    entries = [entry for chunk in chunks for entry in chunk.delta.tool_calls or ()]
    assert [entry.function.name for entry in entries if entry.function.name] == [call.function.name]
    assert "".join(entry.function.arguments or "" for entry in entries) == call.function.arguments
    assert not any(chunk.delta.content for chunk in chunks) and chunks[-1].finish_reason == "tool_calls"
    assert len(entries) > 3


def test_a_strict_function_leaves_the_model_free_not_to_call(client, model):
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    ask = {"model": model, "messages": FRANCE, "tools": strict, "temperature": 0, "max_tokens": 60}
    choice = client.chat.completions.create(**ask).choices[0]
    assert choice.message.content or choice.message.tool_calls
    for call in choice.message.tool_calls or ():
        jsonschema.validate(json.loads(call.function.arguments), TRIP)


def test_a_conversation_goes_on_after_a_call(client, model):
    ask = {"model": model, "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    first = client.chat.completions.create(**ask, messages=FRANCE, tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "It is Paris."}
    said = [*FRANCE, first.model_dump(exclude_none=True), result]
    reply = client.chat.completions.create(**ask, messages=said, tool_choice="none").choices[0]
    assert reply.message.content and reply.message.tool_calls is None


def test_an_agent_calls_and_goes_on_through_responses(client, model):
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice = {"type": "function", "name": NAMED["function"]["name"]}
    ask = {"model": model, "tools": flat, "temperature": 0, "max_output_tokens": 120}
    first = client.responses.create(**ask, input=FRANCE, tool_choice=choice)
    (call,) = first.output
    assert call.name == choice["name"] and isinstance(json.loads(call.arguments), dict)
    chat = {"model": model, "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    theirs = client.chat.completions.create(**chat, messages=FRANCE, tool_choice=NAMED).choices[0].message.tool_calls
    assert [made.function.arguments for made in theirs] == [call.arguments]
    with client.responses.stream(**ask, input=FRANCE, tool_choice=choice) as stream:
        told = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
    assert told == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is Paris."}
    said = [*FRANCE, *(item.model_dump() for item in first.output), result]
    reply = client.responses.create(**ask, input=said, tool_choice="none")
    assert reply.output_text and [item.type for item in reply.output] == ["message"]


def test_an_answer_of_a_format_may_be_asked_for_beside_tools(client, model):
    wanted = {"type": "json_schema", "json_schema": {"name": "capital", "schema": Capital.model_json_schema()}}
    ask = {"model": model, "messages": FRANCE, "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    message = client.chat.completions.create(**ask, response_format=wanted).choices[0].message
    assert message.tool_calls or Capital.model_validate_json(message.content)
