"""From a prepared request to the response that runs and writes it."""

from dataclasses import replace

from fastapi import Request, Response

from contracts.errors import RequestError
from gateway.api.response_formatter import ResponseFormatter
from gateway.generation.generation_state import GenerationState
from gateway.http.context import AppContext
from gateway.http.request_ids import given_id
from gateway.http.streaming_response import GenerationResponse
from gateway.prompting.generation_request import GenerationRequest
from gateway.prompting.request_fields import Common
from gateway.serving.generation_run import GenerationRun, Style
from gateway.tenants.tenant_accounts import TenantAccount

WHOLE = Style(stream=False, include_usage=False, continuous_usage=False)


def start_generation(
    request: Request, asked: Common, asks: list[GenerationRequest], replies: ResponseFormatter
) -> Response:
    """Return the response that places `asks` and writes their answers."""
    return begin_generation(request, asks, replies, _style(asked))


def begin_generation(
    request: Request, asks: list[GenerationRequest], replies: ResponseFormatter, style: Style
) -> Response:
    """Return the same in a given style. Raises RequestError for text of a classifier."""
    context: AppContext = request.app.state.context
    if context.checkpoint.score is not None and not asks[0].sampling.returns_embedding:
        raise RequestError("this model classifies texts, and writes none: POST /score or /rerank")
    account: TenantAccount | None = getattr(request.state, "tenant", None)
    if account is not None:
        facts = {"tenant": account.name, "weight": account.tenant.weight}
        asks = [replace(ask, priority=account.urgency(ask.priority), **facts) for ask in asks]
    if (adapter := request.state.served.adapter) is not None:
        asks = [replace(ask, adapter=adapter) for ask in asks]
    eos = tuple(context.checkpoint.eos_token_ids)
    serving = GenerationRun(
        id=replies.id,
        answers=[GenerationState(ask, context.prompting, eos) for ask in asks],
        replies=replies,
        style=style,
        dispatch=context.dispatch,
        admission=context.admission,
        account=account,
        metrics=context.metrics,
        timeout_s=context.settings.request_timeout_s,
        started_s=request.state.started_s,
        receive_s=request.state.started_s - request.state.came_s,
        echo_id=given_id(request),
        trace=context.tracing and context.tracing.begin(request.url.path, request.headers),
    )
    return GenerationResponse(serving)


def _style(asked: Common) -> Style:
    options = asked.stream_options
    include = bool(options and options.include_usage)
    return Style(bool(asked.stream), include, include and bool(options and options.continuous_usage_stats))
