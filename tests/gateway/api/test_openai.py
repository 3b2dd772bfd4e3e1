"""openai-python against a real gateway and fake workers, which answer with the prompt's own tokens."""

import asyncio

import openai
import pytest

from tests.gateway.gateway_rig import gateway, pair

TEXT = "The quick brown fox jumps over the lazy dog. "
SAY = [{"role": "user", "content": "héllo 😀 wörld"}]


@pytest.fixture
async def client(rig):
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="x", max_retries=0) as client:
        yield client


async def test_a_completion_is_whole(rig, client):
    ids = rig.front.prompting.tokenizer.encode(TEXT).ids
    reply = await client.completions.create(model=rig.front.model, prompt=TEXT, max_tokens=len(ids))
    assert reply.choices[0].text == TEXT
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), len(ids))
    await rig.until(rig.is_idle)


async def test_an_answer_whose_acceptance_was_set_says_so(checkpoint, rig, client):
    ask = {"model": rig.front.model, "prompt": TEXT, "max_tokens": 2}
    assert (await client.completions.create(**ask)).system_fingerprint == f"tandem-{rig.front.version}"
    async with (
        gateway(checkpoint, pair(synthetic_acceptance=2.8)) as measuring,
        openai.AsyncOpenAI(base_url=f"{measuring.url}/v1", api_key="x", max_retries=0) as client,
    ):
        reply = await client.completions.create(**ask)
    assert reply.system_fingerprint == f"tandem-{rig.front.version}-synthetic-acceptance-2.8"


async def test_a_streamed_chat_equals_the_whole_one(rig, client):
    ask = {"model": rig.front.model, "messages": SAY, "max_tokens": 40}
    whole = await client.chat.completions.create(**ask)
    text, roles, usage = "", [], None
    async for chunk in await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            roles.append(choice.delta.role)
    assert text == whole.choices[0].message.content
    assert "😀" in text
    assert roles[0] == "assistant"
    assert usage is not None and usage.completion_tokens == 40


async def test_a_stop_string_that_spans_tokens_never_leaks(rig, client):
    ask = {"model": rig.front.model, "prompt": TEXT, "max_tokens": 30, "stop": ["own f"]}
    parts = [c.choices[0] async for c in await client.completions.create(**ask, stream=True)]
    assert "".join(part.text for part in parts) == "The quick br"
    assert parts[-1].finish_reason == "stop"
    await rig.until(lambda: all(worker.cancels for worker in rig.workers))


async def test_n_choices_share_seed_and_count_the_prompt_once(rig, client):
    reply = await client.completions.create(model=rig.front.model, prompt=TEXT, n=3, max_tokens=4)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    sampling = [job.sampling for job in rig.workers[0].jobs]
    assert sorted(s.choice for s in sampling) == [0, 1, 2]
    assert len({s.seed for s in sampling}) == 1
    assert reply.usage.completion_tokens == 12
    assert reply.usage.prompt_tokens == len(rig.workers[0].jobs[0].token_ids)


async def test_logprobs_are_aligned_with_the_text(rig, client):
    reply = await client.completions.create(model=rig.front.model, prompt=TEXT, logprobs=2, max_tokens=6)
    choice = reply.choices[0]
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    chat = await client.chat.completions.create(
        model=rig.front.model, messages=SAY, logprobs=True, top_logprobs=1, max_completion_tokens=5
    )
    assert len(chat.choices[0].logprobs.content) == 5


async def test_echo_token_ids_and_lists(rig, client):
    ids = rig.front.prompting.tokenizer.encode(TEXT).ids
    reply = await client.completions.create(model=rig.front.model, prompt=[ids, ids], echo=True, max_tokens=1)
    assert [choice.text for choice in reply.choices] == [TEXT + "The"] * 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 3), ("n", 0), ("max_tokens", 5000), ("stop_token_ids", [99999]), ("suffix", "x"), ("prompt", [])],
)
async def test_a_bad_field_is_named(rig, client, field, value):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=rig.front.model, prompt="a", extra_body={field: value})
    assert caught.value.param == field
    assert rig.store.placed == []


async def test_an_unknown_model_and_an_overload(rig, client):
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="nope", prompt="a")
    rig.store.overloaded = True
    with pytest.raises(openai.RateLimitError) as caught:
        await client.completions.create(model=rig.front.model, prompt="a")
    assert caught.value.response.headers["retry-after"] == "3"


async def test_the_synchronous_client(rig):
    def ask() -> list[str]:
        with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="x") as client:
            return [model.id for model in client.models.list()]

    assert await asyncio.to_thread(ask) == [rig.front.model]
