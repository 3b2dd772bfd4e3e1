"""Conversations whose right answers are known.

They are greedy, in float32, of one worker that nothing disturbs.
"""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.load.client import GREEDY, random_prompt

VOCABULARY = 32_000
FIRST_TOKENS = (33, 65, 130)
NEXT_TOKENS = (8, 20, 40)
ANSWER_TOKENS = (4, 8, 8, 16, 16, 48)
LAST_ANSWER_TOKENS = (*ANSWER_TOKENS, 320)
"""With a long one, which lasts until it has moved when its worker drains, however fast guesses make it."""
NUM_AT_ONCE = 48
"""Conversations that are held at the same time for their right answers: no bit depends on what else is in a batch."""
ASK_TIMEOUT_S = 240.0
PROGRESS_S = 30.0


@dataclass(frozen=True)
class Turn:
    """A prompt, which begins with all that was said before, and its right answer, as token ids."""

    prompt: list[int]
    answer: list[int]


@dataclass(eq=False)
class KnownConversation:
    turns: list[Turn] = field(default_factory=list)
    num_done: int = 0


@dataclass(frozen=True)
class Reply:
    """The tokens of an answer and how many of its prompt were cached; or the `error` instead of them."""

    tokens: list[int]
    num_cached: int = 0
    error: str = ""


async def known_conversations(
    http: aiohttp.ClientSession,
    url: str,
    model: str,
    count: int,
    num_turns: int,
    rng: random.Random,
    vocabulary: int = VOCABULARY,
) -> list[KnownConversation]:
    """Hold the conversations with the system at `url`, with token ids below `vocabulary`.

    Raises RuntimeError if a request fails.
    """
    conversations = [KnownConversation() for _ in range(count)]
    seeds = [rng.random() for _ in range(count)]
    waiting = iter(list(zip(conversations, seeds, strict=True)))
    told_s = time.monotonic()

    async def hold() -> None:
        nonlocal told_s
        for conversation, seed in waiting:
            await _hold(http, url, model, conversation, num_turns, random.Random(seed), vocabulary)
            if time.monotonic() - told_s > PROGRESS_S:
                told_s = time.monotonic()
                num_known = sum(len(one.turns) == num_turns for one in conversations)
                print(f"the right answers of {num_known} of {count} are known", file=sys.stderr, flush=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_AT_ONCE):
            group.create_task(hold())
    return conversations


async def _hold(
    http: aiohttp.ClientSession,
    url: str,
    model: str,
    conversation: KnownConversation,
    num_turns: int,
    rng: random.Random,
    vocabulary: int,
) -> None:
    said: list[int] = []
    for turn in range(num_turns):
        num_new = rng.choice(NEXT_TOKENS if turn else FIRST_TOKENS)
        prompt = said + random_prompt(num_new, rng, vocabulary)
        num_tokens = rng.choice(LAST_ANSWER_TOKENS if turn + 1 == num_turns else ANSWER_TOKENS)
        reply = await complete(http, url, model, prompt, num_tokens)
        if reply.error or len(reply.tokens) != num_tokens:
            raise RuntimeError(f"without any fault: {reply}")
        conversation.turns.append(Turn(prompt, reply.tokens))
        said = prompt + reply.tokens


async def complete(http: aiohttp.ClientSession, url: str, model: str, prompt: Sequence[int], num_tokens: int) -> Reply:
    """Ask for exactly `num_tokens` greedy tokens; a request that fails has its error in the reply."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        **GREEDY,
    }
    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    try:
        async with http.post(f"{url}/v1/completions", json=body, timeout=timeout) as response:
            said = await response.json(content_type=None)
            if response.status != 200:
                return Reply([], error=f"HTTP {response.status} {said}")
    except TimeoutError:
        return Reply([], error=f"lost: no end within {ASK_TIMEOUT_S:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return Reply([], error=f"connection lost: {type(error).__name__}: {error}")
    details = said["usage"].get("prompt_tokens_details") or {}
    return Reply(said["choices"][0]["token_ids"], details.get("cached_tokens", 0))
