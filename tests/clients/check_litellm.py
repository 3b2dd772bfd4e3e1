"""The litellm client, told only that this is an OpenAI server."""

import json

import litellm
import pydantic
import pytest
from conftest import FRANCE, WEATHER


class Capital(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    is_large: bool


@pytest.fixture
def ask(url, model) -> dict:
    return {
        "model": f"openai/{model}",
        "api_base": url,
        "api_key": "none",
        "messages": FRANCE,
        "temperature": 0,
        "num_retries": 0,
        "timeout": 60,
    }


def test_chat(ask):
    reply = litellm.completion(**ask)
    assert "Paris" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens > 0


def test_stream(ask):
    chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks, messages=FRANCE)
    assert whole.choices[0].message.content == litellm.completion(**ask).choices[0].message.content
    assert whole.usage.completion_tokens > 0


async def test_async_whole_and_streamed(ask):
    whole = await litellm.acompletion(**ask)
    stream = await litellm.acompletion(**ask, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content


def test_text_completion(ask, model):
    fields = {name: value for name, value in ask.items() if name not in ("messages", "model")}
    reply = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="1, 2, 3,", max_tokens=8, logprobs=1, **fields
    )
    assert "4" in reply.choices[0].text


def test_structured_output(ask):
    reply = litellm.completion(**ask, response_format=Capital)
    assert Capital.model_validate_json(reply.choices[0].message.content)
    free = litellm.completion(**ask, response_format={"type": "json_object"}, max_tokens=64)
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content), dict)


def test_a_tool_that_has_to_be_called(ask):
    fields = {"tools": [WEATHER], "tool_choice": "required"}
    (call,) = litellm.completion(**ask, **fields).choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"]
    chunks = list(litellm.completion(**ask, **fields, stream=True))
    streamed = litellm.stream_chunk_builder(chunks, messages=FRANCE).choices[0].message.tool_calls[0]
    assert streamed.function.arguments == call.function.arguments


def test_log_probabilities_and_choices(ask):
    reply = litellm.completion(**ask | {"temperature": 1}, n=2, seed=3, max_tokens=4, logprobs=True, top_logprobs=2)
    assert len(reply.choices) == 2
    assert all(len(choice.logprobs.content) == 4 for choice in reply.choices)


def test_parameters_of_vllm_pass_through(ask):
    reply = litellm.completion(**ask, extra_body={"structured_outputs": {"choice": ["yes", "no"]}, "priority": -1})
    assert reply.choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"temperature": -1}, litellm.BadRequestError),
        ({"model": "openai/nobody"}, litellm.NotFoundError),
        ({"max_tokens": 10**9}, litellm.ContextWindowExceededError),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, litellm.ContextWindowExceededError),
    ],
)
def test_errors(ask, fields, kind):
    with pytest.raises(kind):
        litellm.completion(**ask | fields)
