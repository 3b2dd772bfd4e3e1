"""Embeddings of texts."""

import time

from fastapi import APIRouter, Request, Response

from gateway.api.openai.embeddings import EmbeddingFormatter
from gateway.api.openapi import EmbeddingsReply, returns, takes
from gateway.http.context import AppContext
from gateway.http.generation_start import WHOLE, begin_generation
from gateway.http.request_ids import response_id
from gateway.http.request_reading import EmbeddingBody
from gateway.prompting.embedding_prompts import prepare_embedding
from gateway.prompting.request_fields import EmbeddingRequest
from gateway.serving.disconnect import run_until_disconnect

router = APIRouter()


@router.post(
    "/v1/embeddings",
    openapi_extra=takes(EmbeddingRequest),
    responses=returns(EmbeddingsReply),
    response_model=None,
)
async def embeddings(request: Request, asked: EmbeddingBody) -> Response:
    """Embeddings of one or more texts: what the model makes of each one's last token."""
    context: AppContext = request.app.state.context
    preparing = prepare_embedding(asked, context.prompting, context.limits, context.checkpoint)
    asks = await run_until_disconnect(request, context.settings.request_timeout_s, preparing)
    replies = EmbeddingFormatter(
        id=response_id(request, "embd"),
        model=request.state.served.name,
        created=int(time.time()),
        dimensions=asked.dimensions or 0,
        is_normalized=context.checkpoint.embedding.is_normalized,
        is_base64=asked.encoding_format == "base64",
    )
    return begin_generation(request, asks, replies, WHOLE)
