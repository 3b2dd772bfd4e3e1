"""What is told of a prompt's own tokens, and of tokens by their ids, against fake workers.

A fake worker says -0.25, rank 1, of every token of a prompt, and -0.5 of every token of an answer.
"""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from checkpoint import Checkpoint
from contracts.errors import Unavailable
from contracts.events import FinishReason, Prefilled, PromptScored, PromptToken, Token
from contracts.hashing import salted
from contracts.ids import Epoch, GatewayId, RequestId
from contracts.sampling import SamplingParams
from coordinator.placement.prefixes import BLOCK_TOKENS
from gateway.api.openai.completions import CompletionFormatter
from gateway.api.openai.vllm_extensions import add_details
from gateway.dispatch.registry_client import StorePlacement
from gateway.generation.generation_state import GenerationState, OutputDelta, ShownToken
from gateway.prompting.chat_template import Prompting
from gateway.prompting.generation_request import GenerationRequest
from testing.memory_store import MemoryStore
from tests.gateway.gateway_rig import gateway, pair

FOX = "The quick brown 日本 fox"
SAY = [{"role": "user", "content": "two three"}]


async def ask(client: httpx.AsyncClient, path: str = "/v1/completions", **fields) -> dict:
    own = {"messages": SAY} if "chat" in path else {"prompt": FOX}
    reply = await client.post(path, json={"max_tokens": 2} | own | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def chunks(client: httpx.AsyncClient, path: str = "/v1/completions", **fields) -> list[dict]:
    own = {"messages": SAY} if "chat" in path else {"prompt": FOX}
    reply = await client.post(path, json={"max_tokens": 3, "stream": True} | own | fields)
    *events, _, _ = reply.text.split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
async def test_an_echo_with_logprobs_begins_with_the_prompts_tokens(client, tokenizer, max_tokens):
    ids = tokenizer.encode(FOX).ids
    reply = await ask(client, echo=True, logprobs=2, max_tokens=max_tokens)
    choice, found = reply["choices"][0], reply["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(ids) + max_tokens
    assert choice["text"].startswith(FOX)
    assert found["tokens"] == [tokenizer.decode([i]) for i in (ids + ids)[: len(ids) + max_tokens]]
    assert found["token_logprobs"] == [None, *[-0.25] * (len(ids) - 1), *[-0.5] * max_tokens]
    assert found["top_logprobs"][0] is None and None not in found["top_logprobs"][1:]
    assert reply["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"
    starts = dict(zip(found["text_offset"], found["tokens"], strict=True))
    assert all(choice["text"].startswith(token, at) for at, token in starts.items() if "\ufffd" not in token)
    assert found["text_offset"] == sorted(found["text_offset"]) and found["text_offset"][0] == 0


async def test_what_begins_every_prompt_has_no_place_in_the_echo(checkpoint: Checkpoint):
    def build():
        tokenizer = deepcopy(checkpoint.tokenizer())
        tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
        return tokenizer

    started = gateway(replace(checkpoint, build_tokenizer=build), pair())
    async with started as rig, rig.client() as client:
        found = (await ask(client, prompt="one two", echo=True, logprobs=0, max_tokens=0))["choices"][0]
    assert found["text"] == "one two"
    assert found["logprobs"]["tokens"] == ["<|im_start|>", "one", " two"]
    assert found["logprobs"]["text_offset"] == [0, 0, 3]


async def test_a_streamed_echo_says_the_same(client):
    fields = {"echo": True, "logprobs": 1, "n": 2, "prompt": ["one two", "three"]}
    whole = await ask(client, max_tokens=3, **fields)
    parts = [choice for body in await chunks(client, **fields) for choice in body["choices"]]
    for choice in whole["choices"]:
        own = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for part in own for value in part["logprobs"][name]] == values


async def test_prompt_logprobs_are_on_each_choice_and_on_the_reply_of_a_chat(client, rig, tokenizer):
    ids = tokenizer.encode(FOX).ids
    reply = await ask(client, prompt_logprobs=3, n=2)
    for choice in reply["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert [list(entry) for entry in others] == [[str(i)] for i in ids[1:]]  # a fake worker repeats itself
        assert others[0][str(ids[1])] == {"logprob": -0.25, "rank": 1, "decoded_token": tokenizer.decode([ids[1]])}
    chat = await ask(client, "/v1/chat/completions", prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == len(rig.workers[0].jobs[-1].token_ids)
    assert "prompt_logprobs" not in chat["choices"][0]
    assert "prompt_logprobs" not in (await ask(client))["choices"][0]


async def test_an_echo_shows_as_many_alternatives_as_it_asked_for(client, rig):
    reply = await ask(client, echo=True, logprobs=1, prompt_logprobs=4)
    assert rig.workers[0].jobs[-1].sampling.prompt_logprobs == 4
    assert {len(top) for top in reply["choices"][0]["logprobs"]["top_logprobs"][1:]} == {1}


def test_a_completion_tells_the_token_beside_the_likeliest_and_the_likeliest_of_those_spelled_alike(checkpoint):
    prompting = Prompting(checkpoint)
    replies = CompletionFormatter("r", "m", 0, True, prompting.token_text)
    first, second = prompting.tokenizer.encode("日").ids[:2]  # neither is a character by itself
    likeliest = [(first, -0.1), (second, -6.0)]
    shown = [ShownToken(Token(0, first, -0.1, likeliest), 0), ShownToken(Token(1, 5, float("-inf"), likeliest), 0)]
    told = replies.choice([OutputDelta(0, shown=tuple(shown), finish=FinishReason.STOP)])["logprobs"]["top_logprobs"]
    assert told == [{"\ufffd": -0.1}, {"\ufffd": -0.1, prompting.token_text(5): -9999.0}]


def test_the_tokens_own_comes_once_beside_the_likeliest(checkpoint):
    sampling = SamplingParams(max_tokens=1, seed=1, prompt_logprobs=2)
    answer = GenerationState(
        GenerationRequest(0, 0, [5, 6, 7], sampling, (), False, True, prompt_logprobs=2), Prompting(checkpoint), (2,)
    )
    tokens = [PromptToken(6, -3.0, 9, [(8, -0.1), (9, -2.0)]), PromptToken(7, float("-inf"), 2, [(8, -0.1), (7, -4.0)])]
    answer.feed(PromptScored(RequestId("r"), Epoch(1), 1, tokens))
    body = {"object": "text_completion", "choices": [{}]}
    add_details(body, [answer])
    (choice,) = body["choices"]
    assert [{i: entry["rank"] for i, entry in (at or {}).items()} for at in choice["prompt_logprobs"]] == [
        {},
        {"6": 9, "8": 1, "9": 2},
        {"7": 2, "8": 1},
    ]


async def test_a_prompt_that_is_scored_in_part_is_a_failure(client, rig, monkeypatch):
    monkeypatch.setattr(rig.workers[0], "_scored", lambda job: [])
    reply = await client.post("/v1/completions", json={"prompt": FOX, "prompt_logprobs": 1})
    assert reply.status_code == 500
    assert "did not come whole" in reply.json()["error"]["message"]


def test_a_new_attempt_begins_without_the_scores_of_the_old(checkpoint):
    sampling = SamplingParams(max_tokens=1, seed=1, prompt_logprobs=0)
    answer = GenerationState(GenerationRequest(0, 0, [5, 6], sampling, (), False, True), Prompting(checkpoint), (2,))
    for epoch in (Epoch(1), Epoch(2)):
        if epoch > 1:
            answer.restart(epoch)
        answer.feed(PromptScored(RequestId("r"), epoch, 1, [PromptToken(6, -1.0 * epoch, 1, [])]))
    assert answer.feed(Prefilled(RequestId("r"), Epoch(2), 0, {})) is None and not answer.ended
    assert [token.logprob for token in answer.prompt_tokens] == [-2.0]


async def test_token_ids_whole_and_streamed(client, rig, tokenizer):
    ids = tokenizer.encode(FOX).ids
    (choice,) = (await ask(client, return_token_ids=True, max_tokens=3))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, ids[:3])
    parts = [choice for body in await chunks(client, return_token_ids=True) for choice in body["choices"]]
    assert [i for part in parts for i in part["token_ids"]] == ids[:3]
    assert [part.get("prompt_token_ids") for part in parts] == [ids, *[None] * (len(parts) - 1)]


async def test_token_ids_of_a_chat(client, rig):
    chat = "/v1/chat/completions"
    whole = await ask(client, chat, return_token_ids=True, max_tokens=3)
    prompt = rig.workers[0].jobs[-1].token_ids
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (prompt, prompt[:3])
    bodies = await chunks(client, chat, return_token_ids=True)
    assert [i for body in bodies for choice in body["choices"] for i in choice.get("token_ids", [])] == prompt[:3]
    assert [body.get("prompt_token_ids") for body in bodies] == [prompt, *[None] * (len(bodies) - 1)]
    assert bodies[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_tokens_are_named_by_their_ids_if_asked(client, tokenizer):
    ids = tokenizer.encode(FOX).ids
    found = (await ask(client, logprobs=1, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]
    assert found["tokens"] == [f"token_id:{i}" for i in ids[:2]]
    assert [list(top) for top in found["top_logprobs"]] == [[f"token_id:{i}"] for i in ids[:2]]
    chat = await ask(
        client, "/v1/chat/completions", logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, max_tokens=1
    )
    (content,) = chat["choices"][0]["logprobs"]["content"]
    assert content["token"] == content["top_logprobs"][0]["token"] and content["token"].startswith("token_id:")


class Asked(MemoryStore):
    """A store that notes whose prefixes are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[bytes]] = []

    async def prefix_holders(self, hashes: Sequence[bytes], blocks: Sequence[bytes] = ()) -> list[bytes]:
        self.asked.append([*hashes])
        return await super().prefix_holders(hashes, blocks)


async def test_a_salt_keeps_prompts_apart_in_placement():
    store = Asked()
    placement = StorePlacement(store, GatewayId("g"))
    for salt in ("", "a", "b", "a"):
        with pytest.raises(Unavailable):
            await placement.place(RequestId("r"), Epoch(1), [7] * 2 * BLOCK_TOKENS, 4, (), salted(salt))
    plain, a, b, again = store.asked
    assert a == again and not {*plain} & {*a} and not {*a} & {*b} and len(plain) == 2
