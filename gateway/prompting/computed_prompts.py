"""Prompts that are computed for the rows of their last tokens, and not answered."""

from dataclasses import replace
from typing import Any

import msgspec

from contracts.errors import RequestError
from gateway.prompting.chat_template import Prompting
from gateway.prompting.generation_request import GenerationRequest
from gateway.prompting.pipeline import prepare_completion
from gateway.prompting.request_fields import CompletionRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from gateway.prompting.token_budget import ServingLimits


async def prepare_computed(
    prompts: str | list[Any],
    request: EmbeddingRequest | ScoreRequest | RerankRequest,
    field: str,
    prompting: Prompting,
    limits: ServingLimits,
    add_special_tokens: bool | None = None,
) -> list[GenerationRequest]:
    """Return what each prompt needs: token 0 of an answer to it, with which the row comes.

    `field`: what the client calls the prompts. Raises RequestError, which names it.
    """
    completion = CompletionRequest(
        prompt=prompts,
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        speculate=False,
        add_special_tokens=add_special_tokens,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    try:
        asks = await prepare_completion(completion, prompting, limits)
    except RequestError as error:
        if error.param != "prompt":
            raise
        raise RequestError(str(error).replace("'prompt'", f"'{field}'"), field) from error
    return [replace(ask, sampling=msgspec.structs.replace(ask.sampling, returns_embedding=True)) for ask in asks]
