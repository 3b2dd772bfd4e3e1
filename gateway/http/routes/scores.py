"""Scores of pairs of texts, and documents in their order."""

import time

from fastapi import APIRouter, Request, Response

from gateway.api.openai.scores import RerankFormatter, ScoreFormatter
from gateway.api.openapi import RerankReply, ScoresReply, returns, takes
from gateway.http.context import AppContext
from gateway.http.generation_start import WHOLE, begin_generation
from gateway.http.request_ids import response_id
from gateway.http.request_reading import RerankBody, ScoreBody
from gateway.prompting.request_fields import RerankRequest, ScoreRequest
from gateway.prompting.score_prompts import pairs_of, prepare_scores
from gateway.serving.disconnect import run_until_disconnect

router = APIRouter()

_SCORE = {"openapi_extra": takes(ScoreRequest), "responses": returns(ScoresReply), "response_model": None}
_RERANK = {"openapi_extra": takes(RerankRequest), "responses": returns(RerankReply), "response_model": None}


@router.post("/score", **_SCORE)
@router.post("/v1/score", **_SCORE)
async def score(request: Request, asked: ScoreBody) -> Response:
    """How well the texts of each pair fit: by a classifier, or as the cosine of their embeddings."""
    context: AppContext = request.app.state.context
    preparing = prepare_scores(pairs_of(asked), asked, context.prompting, context.limits, context.checkpoint)
    prompts = await run_until_disconnect(request, context.settings.request_timeout_s, preparing)
    replies = ScoreFormatter(
        id=response_id(request, "score"),
        model=request.state.served.name,
        created=int(time.time()),
        parts=prompts.parts,
        form=context.checkpoint.score,
    )
    return begin_generation(request, prompts.asks, replies, WHOLE)


@router.post("/rerank", **_RERANK)
@router.post("/v1/rerank", **_RERANK)
@router.post("/v2/rerank", **_RERANK)
async def rerank(request: Request, asked: RerankBody) -> Response:
    """Documents by how well each fits the query, the best first."""
    context: AppContext = request.app.state.context
    pairs = [(asked.query, document) for document in asked.documents]
    preparing = prepare_scores(pairs, asked, context.prompting, context.limits, context.checkpoint)
    prompts = await run_until_disconnect(request, context.settings.request_timeout_s, preparing)
    replies = RerankFormatter(
        id=response_id(request, "rerank"),
        model=request.state.served.name,
        created=int(time.time()),
        parts=prompts.parts,
        form=context.checkpoint.score,
        documents=tuple(asked.documents),
        top_n=asked.top_n or 0,
    )
    return begin_generation(request, prompts.asks, replies, WHOLE)
