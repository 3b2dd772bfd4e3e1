"""The texts of a request for embeddings, as prompts that are computed and not answered."""

from checkpoint import Checkpoint
from contracts.errors import RequestError
from gateway.prompting.chat_template import Prompting
from gateway.prompting.computed_prompts import prepare_computed
from gateway.prompting.generation_request import GenerationRequest
from gateway.prompting.request_fields import EmbeddingRequest
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
    return await prepare_computed(request.input, request, "input", prompting, limits, request.add_special_tokens)
