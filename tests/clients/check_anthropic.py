"""The anthropic client, told only where the server is."""

import anthropic
import pytest
from conftest import FRANCE, WEATHER

TOOL = {
    "name": "weather",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}


@pytest.fixture
def client(url) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def ask(model) -> dict:
    greedy = {"temperature": 0}  # no parameter of this client, which sends what it is given beside them
    return {"model": model, "messages": FRANCE, "max_tokens": 60, "extra_body": greedy}


def test_a_message(client, ask):
    reply = client.messages.create(**ask, system="Answer in one sentence.")
    assert "Paris" in reply.content[0].text
    assert (reply.stop_reason, reply.role) == ("end_turn", "assistant")
    assert reply.usage.output_tokens > 0 and reply.usage.input_tokens > 0


def test_a_stream(client, ask):
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == client.messages.create(**ask).content[0].text
    assert final.stop_reason == "end_turn" and final.usage.output_tokens > 0


async def test_a_stream_of_the_async_client(client, ask, url):
    other = anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    async with other, other.messages.stream(**ask) as stream:
        text = "".join([part async for part in stream.text_stream])
    assert text == client.messages.create(**ask).content[0].text


def test_stop_sequences(client, ask):
    reply = client.messages.create(**ask, stop_sequences=["France"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "France")


def test_a_call_and_its_result(client, ask):
    given = ask | {"messages": [{"role": "user", "content": "How is the weather in Paris?"}], "tools": [TOOL]}
    reply = client.messages.create(**given, tool_choice={"type": "any"})
    (call,) = reply.content
    assert (call.type, call.name, reply.stop_reason) == ("tool_use", "weather", "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 20 degrees"}
    turns = [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**given | {"messages": given["messages"] + turns})
    assert after.content


def test_a_call_in_a_stream(client, ask):
    with client.messages.stream(**ask, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}) as stream:
        (call,) = stream.get_final_message().content
    assert (call.type, call.name) == ("tool_use", "weather") and set(call.input) == {"city"}


def test_tokens_are_counted(client, ask):
    counted = client.messages.count_tokens(model=ask["model"], messages=FRANCE)
    usage = client.messages.create(**ask).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_have_their_types(client, ask):
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**ask | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]"):
        picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
        client.messages.create(**ask | {"messages": [{"role": "user", "content": [picture]}]})
