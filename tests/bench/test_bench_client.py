"""The client that only takes times, against a server that streams, or misbehaves, as told."""

import asyncio
import random

import pytest

from bench.load.client import VOCABULARY, StreamResult, ask, body_of, random_prompt, session
from tests.bench.completions import Server, served

QUIET_S = 1.0


async def asked(server: Server, max_tokens: int = 5, leave_after: int | None = None) -> StreamResult:
    async with asyncio.timeout(60), session(total_s=None) as http:
        return await ask(http, server.url, body_of("m", [1, 2], max_tokens), max_tokens, leave_after, QUIET_S)


async def test_each_event_is_a_token_with_its_time():
    async with served("good") as server:
        answer = await asked(server)
    assert (answer.num_tokens, len(answer.gaps_s), answer.reason, answer.error) == (5, 4, "", "")
    assert 0 < answer.ttft_s <= answer.ttft_s + sum(answer.gaps_s) <= answer.total_s
    assert server.bodies == [
        {
            "model": "m",
            "prompt": [1, 2],
            "max_tokens": 5,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_the_servers_count_of_tokens_holds_and_a_bare_end_is_no_gap():
    async with served("bare_end") as server:
        answer = await asked(server)
    assert (answer.num_tokens, len(answer.gaps_s), answer.reason) == (5, 2, "")  # three events with text


async def test_an_event_of_several_tokens_is_one_gap_and_one_without_text_is_a_token():
    async with served("merged") as server:
        answer = await asked(server, max_tokens=6)
    assert (answer.num_tokens, len(answer.gaps_s), answer.reason) == (6, 2, "")


async def test_a_stream_may_be_called_json():
    async with served("by_toy_proxy") as server:
        answer = await asked(server)
    assert (answer.num_tokens, len(answer.gaps_s), answer.reason) == (5, 4, "")


@pytest.mark.parametrize(
    ("way", "reason", "words"),
    [
        ("refused", "HTTP 429", '429 {"error": {"message": "too much work"}}'),
        ("hanging", "silent", "no token came for 1 s"),
        ("hanging_midway", "silent", "no token came for 1 s"),
        ("endless_comments", "silent", "no token came for 1 s"),
        ("no_http", "garbage", "ClientResponseError: 400"),
        ("page", "garbage", "it answers with text/html, not with a stream of events"),
        ("no_json", "garbage", "JSONDecodeError: Expecting property name"),
        ("no_choices", "garbage", "{'choices': 'none'}"),
        ("no_object", "garbage", "[1]"),
        ("deep", "garbage", "RecursionError: "),
        ("long_line", "garbage", "LineTooLong: "),
        ("unfinished", "no finish_reason", "the stream ended without a finish_reason"),
        ("empty", "no token", "the answer is complete and has no token"),
        ("failing", "error in the stream", "{'message': 'the worker died'}"),
        ("cut", "connection lost", "ClientPayloadError: "),
        ("endless", "more than asked for", "more than 5 tokens came"),
    ],
)
async def test_what_goes_wrong_has_a_reason_and_an_end(way: str, reason: str, words: str):
    async with served(way) as server:
        answer = await asked(server)
    assert answer.reason == reason
    assert answer.error.startswith(words)


async def test_nobody_there_is_no_connection():
    async with served("good") as server:
        pass
    answer = await asked(server)
    assert answer.reason == "no connection" and answer.total_s > 0


async def test_leaving_early_closes_the_stream_and_is_no_failure():
    async with served("endless") as server, session() as http:
        answer = await ask(http, server.url, body_of("m", [1], 1000), 1000, leave_after=2)
        await asyncio.wait_for(server.left.wait(), 30)
    assert (answer.num_tokens, answer.reason) == (2, "")


def test_random_prompts_differ_and_stay_in_every_vocabulary():
    rng = random.Random(0)
    prompts = [random_prompt(50, rng) for _ in range(20)]
    assert len({tuple(prompt) for prompt in prompts}) == 20
    assert all(10 <= token < VOCABULARY for prompt in prompts for token in prompt)
    assert set(random_prompt(200, rng, vocabulary=2)) == {1}
