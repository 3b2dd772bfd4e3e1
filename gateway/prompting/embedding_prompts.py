"""The texts of a request for embeddings, as prompts that are computed and not answered."""

from dataclasses import replace

import msgspec

from checkpoint import Checkpoint
from contracts.errors import RequestError
from gateway.prompting.chat_template import Prompting
from gateway.prompting.generation_request import GenerationRequest
from gateway.prompting.pipeline import prepare_completion
from gateway.prompting.request_fields import CompletionRequest, EmbeddingRequest
from gateway.prompting.token_budget import ServingLimits


async def prepare_embedding(
    request: EmbeddingRequest, prompting: Prompting, limits: ServingLimits, checkpoint: Checkpoint
) -> list[GenerationRequest]:
    """Return what each text needs: token 0 of an answer to it, with which the embedding comes.

    Raises RequestError, which names the field.
    """
    width = checkpoint.config.hidden_size
    if fault := checkpoint.embedding.fault:
        raise RequestError(f"this model makes no embeddings here: {fault}")
    if request.dimensions is not None and request.dimensions > width:
        raise RequestError(
            f"'dimensions' is {request.dimensions}; an embedding of this model has {width}", "dimensions"
        )
    completion = CompletionRequest(
        prompt=request.input,
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        speculate=False,
        add_special_tokens=request.add_special_tokens,
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
        raise RequestError(str(error).replace("'prompt'", "'input'"), "input") from error
    return [replace(ask, sampling=msgspec.structs.replace(ask.sampling, returns_embedding=True)) for ask in asks]
