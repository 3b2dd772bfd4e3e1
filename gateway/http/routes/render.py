"""The prompts of requests that are not answered, as token ids: vLLM's render endpoints."""

import msgspec
from fastapi import APIRouter, Request, Response

from gateway.api.openai.render import rendered_body
from gateway.api.openapi import RenderReply, returns, takes
from gateway.http.context import AppContext
from gateway.http.request_ids import response_id
from gateway.http.request_reading import ChatBody, CompletionBody
from gateway.prompting.pipeline import prepare_chat, prepare_completion, with_allowed_tools
from gateway.prompting.request_fields import ChatRequest, CompletionRequest
from gateway.serving.disconnect import run_until_disconnect

router = APIRouter()


@router.post(
    "/v1/chat/completions/render",
    openapi_extra=takes(ChatRequest),
    responses=returns(RenderReply),
    response_model=None,
)
async def render_chat(request: Request, asked: ChatBody) -> Response:
    """The prompt of a conversation, checked and tokenized as for an answer."""
    context: AppContext = request.app.state.context
    preparing = prepare_chat(with_allowed_tools(asked), context.prompting, context.limits)
    [prompt, *_] = await run_until_disconnect(request, context.settings.request_timeout_s, preparing)
    return _json(rendered_body(asked, prompt, response_id(request, "chatcmpl"), request.state.served.name))


@router.post(
    "/v1/completions/render",
    openapi_extra=takes(CompletionRequest),
    responses=returns(list[RenderReply]),
    response_model=None,
)
async def render_completion(request: Request, asked: CompletionBody) -> Response:
    """The prompts of a completion, checked and tokenized as for their continuations."""
    context: AppContext = request.app.state.context
    preparing = prepare_completion(asked, context.prompting, context.limits)
    asks = await run_until_disconnect(request, context.settings.request_timeout_s, preparing)
    prompts, name = asks[:: asked.n or 1], response_id(request, "cmpl")
    ids = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
    model = request.state.served.name
    return _json([rendered_body(asked, prompt, own_id, model) for prompt, own_id in zip(prompts, ids, strict=True)])


def _json(reply: object) -> Response:
    """Return `reply` as it is: FastAPI takes seconds to look at each of a million token ids."""
    return Response(msgspec.json.encode(reply), media_type="application/json")
