"""A gateway before fake workers that answer what a model would, and what such a model is asked. Not a test."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import openai
from tokenizers import AddedToken

from checkpoint import Checkpoint
from testing.fake_worker import FakeWorker
from tests.gateway.gateway_rig import Rig, gateway, pair

SAY: Any = [{"role": "user", "content": "weather?"}]


@asynccontextmanager
async def saying(
    checkpoint: Checkpoint,
    text: str,
    in_characters: bool = False,
    workers: list[FakeWorker] | None = None,
    **given: Any,
) -> AsyncIterator[tuple[Rig, Any]]:
    """A gateway whose model answers `text`. `in_characters`: with a token or more for each, but for special tokens.
    `given`: settings.
    """
    async with gateway(checkpoint, workers or pair(), **given) as rig:
        tokenizer = rig.front.prompting.tokenizer
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        pieces = re.findall("|".join(map(re.escape, added)) + "|.", text, re.DOTALL) if in_characters else [text]
        script = [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False).ids]
        for worker in rig.workers:
            worker.script = script
        async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="x", max_retries=0) as client:
            yield rig, client


async def prompt(rig: Rig, client: Any, **fields: Any) -> str:
    """What the model sees of a request."""
    rig.workers[0].jobs.clear()
    await client.chat.completions.create(**{"model": rig.front.model, "messages": SAY, "max_tokens": 1} | fields)
    return rig.front.prompting.tokenizer.decode(rig.workers[0].jobs[0].token_ids, skip_special_tokens=False)


@lru_cache(maxsize=8)
def with_specials(checkpoint: Checkpoint, template: str, specials: tuple[str, ...], plain: tuple[str, ...] = ()):
    """`plain`: tokens of their own that are not special, as Qwen 3's tags."""

    @cache
    def build():
        tokenizer = deepcopy(checkpoint.tokenizer())
        tokenizer.add_special_tokens(list(specials))
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
        return tokenizer

    config = replace(checkpoint.config, vocab_size=build().get_vocab_size())
    return replace(checkpoint, build_tokenizer=build, config=config, chat_template=template)
