"""openai-python: sync and async, whole and streamed, parsed answers, errors as its own classes."""

import asyncio
import json
from typing import Literal

import openai
import pydantic
import pytest
from conftest import FRANCE, WEATHER


class Capital(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_models(client, model):
    assert [card.id for card in client.models.list()] == [model]


def test_chat(client, model):
    reply = client.chat.completions.create(model=model, messages=FRANCE, temperature=0)
    assert "Paris" in reply.choices[0].message.content
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_stream(client, model):
    ask = {"model": model, "messages": FRANCE, "temperature": 0}
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == client.chat.completions.create(**ask).choices[0].message.content
    assert chunks[-1].usage.completion_tokens > 0


def test_stream_helper(client, model):
    with client.chat.completions.stream(model=model, messages=FRANCE, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert "Paris" in final.choices[0].message.content


async def test_async_clients_share_the_server(url, model):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        ask = {"model": model, "messages": FRANCE, "temperature": 0, "max_tokens": 12}
        whole, stream, *others = await asyncio.gather(
            client.chat.completions.create(**ask),
            client.chat.completions.create(**ask, stream=True),
            *(client.completions.create(model=model, prompt=f"{n}, {n + 1},", max_tokens=4) for n in range(6)),
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content
    assert [reply.usage.completion_tokens for reply in others] == [4] * 6


def test_parsed_answers(client, model):
    reply = client.chat.completions.parse(model=model, messages=FRANCE, response_format=Capital, temperature=0)
    assert isinstance(reply.choices[0].message.parsed, Capital)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_that_has_to_be_called(client, model, choice):
    ask = {"model": model, "messages": FRANCE, "tools": [WEATHER], "tool_choice": choice, "temperature": 0}
    reply = client.chat.completions.create(**ask).choices[0]
    (call,) = reply.message.tool_calls
    assert call.function.name == "weather" and isinstance(json.loads(call.function.arguments)["city"], str)
    asked, result = reply.message.model_dump(exclude_none=True), {"tool_call_id": call.id, "content": "sunny"}
    after = [*FRANCE, asked, {"role": "tool", **result}]
    assert client.chat.completions.create(model=model, messages=after, tools=[WEATHER], max_tokens=8).choices


def test_a_streamed_tool_call_joins_to_the_whole(client, model):
    ask = {"model": model, "messages": FRANCE, "tools": [WEATHER], "tool_choice": "required", "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0].message.tool_calls[0].function
    with client.chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == whole.arguments


def test_completions_of_token_ids_with_log_probabilities(client, model):
    reply = client.completions.create(
        model=model, prompt=[[504, 2365], [6354]], max_tokens=3, logprobs=2, echo=True, temperature=0
    )
    for choice, num_prompt in zip(reply.choices, (2, 1), strict=True):
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.token_logprobs) == num_prompt + 3


def test_responses(client, model):
    reply = client.responses.create(model=model, input="What is the capital of France?", temperature=0)
    assert "Paris" in reply.output_text


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "nobody"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
        ({"max_tokens": 10**9}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.BadRequestError),
    ],
)
def test_errors(client, model, fields, kind):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": model, "messages": FRANCE} | fields)
    assert caught.value.body["message"]
