"""Conversations whose right answers are known.

They are greedy, in float32, of one worker that nothing disturbs.
"""

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.load.client import GREEDY, random_prompt

VOCABULARY = 32_000
FIRST_TOKENS = (40, 120, 250)
NEXT_TOKENS = (8, 25, 60)
ANSWER_TOKENS = (8, 16, 33)
ASK_TIMEOUT_S = 120.0
PROGRESS_S = 30.0


@dataclass(frozen=True)
class Turn:
    """A prompt, which begins with all that was said before, and its right answer, as token ids."""

    prompt: list[int]
    answer: list[int]


@dataclass
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
    http: aiohttp.ClientSession, url: str, model: str, count: int, num_turns: int, rng: random.Random
) -> list[KnownConversation]:
    """Hold the conversations with the system at `url` one after another.

    Raises RuntimeError if a request fails.
    """
    conversations: list[KnownConversation] = []
    told_s = time.monotonic()
    for index in range(count):
        if time.monotonic() - told_s > PROGRESS_S:
            told_s = time.monotonic()
            print(f"the right answers of {index} of {count} conversations are known", file=sys.stderr, flush=True)
        conversation, said = KnownConversation(), list[int]()
        for turn in range(num_turns):
            num_new = rng.choice(NEXT_TOKENS if turn else FIRST_TOKENS)
            prompt = said + random_prompt(num_new, rng, VOCABULARY)
            num_tokens = rng.choice(ANSWER_TOKENS)
            reply = await complete(http, url, model, prompt, num_tokens)
            if reply.error or len(reply.tokens) != num_tokens:
                raise RuntimeError(f"without any fault: {reply}")
            conversation.turns.append(Turn(prompt, reply.tokens))
            said = prompt + reply.tokens
        conversations.append(conversation)
    return conversations


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
