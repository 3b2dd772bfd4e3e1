"""Anthropic's Messages API."""

import msgspec
from fastapi import APIRouter, Request, Response

from contracts.errors import RequestError
from gateway.api.anthropic.messages import MessagesFormatter
from gateway.api.anthropic.messages_input import tells_thoughts, to_conversation
from gateway.api.anthropic.schema import CountTokensRequest, MessagesRequest
from gateway.api.openapi import AnthropicErrorReply, CountTokensReply, MessagesReply, returns, takes
from gateway.generation.output_parser import parser_spec
from gateway.http.context import AppContext
from gateway.http.generation_start import begin_generation
from gateway.http.request_ids import response_id
from gateway.http.request_reading import CountTokensBody, MessagesBody
from gateway.prompting.pipeline import prepare_chat
from gateway.serving.disconnect import run_until_disconnect
from gateway.serving.generation_run import Style
from gateway.tool_calling.tool_choice import calling_of

router = APIRouter()


@router.post(
    "/v1/messages",
    openapi_extra=takes(MessagesRequest),
    responses=returns(MessagesReply, streams=True, error=AnthropicErrorReply),
    response_model=None,
)
async def messages(request: Request, asked: MessagesBody) -> Response:
    """One answer to a conversation in the form of Anthropic's Messages API."""
    context: AppContext = request.app.state.context
    given = to_conversation(asked)
    chat = given.chat
    try:
        preparing = prepare_chat(chat, context.prompting, context.limits, "max_tokens")
        asks = await run_until_disconnect(request, context.settings.request_timeout_s, preparing)
    except RequestError as error:
        raise given.named(error) from error
    calling = calling_of(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    reading = parser_spec(context.prompting, asks[0].begun, calling)
    replies = MessagesFormatter(
        response_id(request, "msg"), request.state.served.name, asked.max_tokens, reading, tells_thoughts(asked)
    )
    return begin_generation(request, asks, replies, Style(bool(asked.stream), False, False))


@router.post(
    "/v1/messages/count_tokens",
    openapi_extra=takes(CountTokensRequest),
    responses=returns(CountTokensReply, error=AnthropicErrorReply),
    response_model=None,
)
async def count_tokens(request: Request, asked: CountTokensBody) -> Response:
    """How many tokens a conversation has, which is not answered."""
    context: AppContext = request.app.state.context
    given = to_conversation(asked)
    try:
        text = context.prompting.render(given.chat)
        encoding = context.prompting.encode([text], False)
        [ids] = await run_until_disconnect(request, context.settings.request_timeout_s, encoding)
    except RequestError as error:
        raise given.named(error) from error
    return Response(msgspec.json.encode({"input_tokens": len(ids)}), media_type="application/json")
