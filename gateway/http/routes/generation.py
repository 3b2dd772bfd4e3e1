"""Answers to conversations and continuations of prompts."""

import time

from fastapi import APIRouter, Request, Response

from gateway.api.openai.chat import ChatFormatter, ParsedChatFormatter
from gateway.api.openai.completions import CompletionFormatter
from gateway.api.openapi import ChatReply, TextReply, returns, takes
from gateway.generation.output_parser import parser_spec
from gateway.http.context import AppContext
from gateway.http.generation_start import start_generation
from gateway.http.request_ids import response_id
from gateway.http.request_reading import ChatBody, CompletionBody
from gateway.prompting.pipeline import prepare_chat, prepare_completion, with_allowed_tools
from gateway.prompting.request_fields import ChatRequest, CompletionRequest
from gateway.serving.disconnect import run_until_disconnect
from gateway.tool_calling.tool_choice import calling_of

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    openapi_extra=takes(ChatRequest),
    responses=returns(ChatReply, streams=True),
    response_model=None,
)
async def chat_completions(request: Request, asked: ChatBody) -> Response:
    """Answers to a conversation, whole or streamed."""
    context: AppContext = request.app.state.context
    asked = with_allowed_tools(asked)
    preparing = prepare_chat(asked, context.prompting, context.limits)
    asks = await run_until_disconnect(request, context.settings.request_timeout_s, preparing)
    replies = ChatFormatter(
        id=response_id(request, "chatcmpl"),
        model=request.state.served.name,
        created=int(time.time()),
        prompting=context.prompting,
        has_logprobs=bool(asked.logprobs),
        spelling=context.spelling(asked),
        fingerprint=context.fingerprint,
    )
    calling = calling_of(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    if (reading := parser_spec(context.prompting, asks[0].begun, calling)) is not None:
        replies = ParsedChatFormatter(replies, reading, asked.include_reasoning is not False)
    return start_generation(request, asked, asks, replies)


@router.post(
    "/v1/completions",
    openapi_extra=takes(CompletionRequest),
    responses=returns(TextReply, streams=True),
    response_model=None,
)
async def completions(request: Request, asked: CompletionBody) -> Response:
    """Continuations of one or more prompts, whole or streamed."""
    context: AppContext = request.app.state.context
    preparing = prepare_completion(asked, context.prompting, context.limits)
    asks = await run_until_disconnect(request, context.settings.request_timeout_s, preparing)
    replies = CompletionFormatter(
        id=response_id(request, "cmpl"),
        model=request.state.served.name,
        created=int(time.time()),
        has_logprobs=asked.logprobs is not None,
        spelling=context.spelling(asked),
        fingerprint=context.fingerprint,
    )
    return start_generation(request, asked, asks, replies)
