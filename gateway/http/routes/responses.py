"""OpenAI's Responses API."""

import logging
import time

from fastapi import APIRouter, Request, Response

from contracts.errors import RequestError
from gateway.api.openai.responses import ResponsesFormatter
from gateway.api.openai.responses_input import named, skipped_tools, to_chat
from gateway.api.openai.schema import ResponsesRequest
from gateway.api.openapi import ResponseReply, returns, takes
from gateway.api.response_formatter import LogprobEntries
from gateway.generation.output_parser import parser_spec
from gateway.http.context import AppContext
from gateway.http.generation_start import start_generation
from gateway.http.request_ids import response_id
from gateway.http.request_reading import ResponsesBody
from gateway.prompting.pipeline import prepare_chat
from gateway.serving.disconnect import run_until_disconnect
from gateway.tool_calling.tool_choice import calling_of

log = logging.getLogger(__name__)

router = APIRouter()


@router.post(
    "/v1/responses",
    openapi_extra=takes(ResponsesRequest),
    responses=returns(ResponseReply, streams=True),
    response_model=None,
)
async def responses(request: Request, asked: ResponsesBody) -> Response:
    """One answer in the form of the Responses API; nothing is stored."""
    context: AppContext = request.app.state.context
    if skipped := skipped_tools(asked):
        log.info("tools of %s are skipped: they run at OpenAI", ", ".join(skipped))
    try:
        chat = to_chat(asked)
        preparing = prepare_chat(chat, context.prompting, context.limits, "max_output_tokens")
        asks = await run_until_disconnect(request, context.settings.request_timeout_s, preparing)
    except RequestError as error:
        raise named(error, asked) from error
    head = (response_id(request, "resp"), request.state.served.name, int(time.time()))
    calling = calling_of(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    reading = parser_spec(context.prompting, asks[0].begun, calling)
    entries = LogprobEntries(context.prompting, context.prompting.token_text) if asked.wants_logprobs else None
    replies = ResponsesFormatter(*head, asked, asks[0].sampling, reading, entries)
    return start_generation(request, asked, asks, replies)
