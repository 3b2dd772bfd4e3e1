"""The body of a request, read as the type that its endpoint takes."""

import asyncio
import time
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Request

from contracts.errors import RequestError
from gateway.api.anthropic.schema import CountTokensRequest, MessagesPrompt, MessagesRequest
from gateway.api.openai.schema import DetokenizeRequest, ResponsesRequest, TokenizeRequest, parse
from gateway.http.context import AppContext
from gateway.json_decoding import Kind
from gateway.prompting.request_fields import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from service.request_body import read_body

BODY_TIMEOUT_S = 30.0


async def read_as(request: Request, kind: type[Kind]) -> Kind:
    """Return the body as a `kind`.

    A request's time begins when it is here; that it was on its way is a stage of its own.
    Raises RequestError and Overloaded.
    """
    context: AppContext = request.app.state.context
    request.state.came_s = time.monotonic()
    _require_plain(request.headers.get("content-encoding", "identity"))
    with context.bodies.arriving() as grown:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await read_body(request, context.settings.max_body_nbytes, grown)
        except TimeoutError as error:
            request.state.is_body_late = True
            raise RequestError(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from error
        request.state.started_s = time.monotonic()
        return parse(body, kind)


class BodyOf:
    """A dependency of a route: the request's body as a `kind`."""

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind

    async def __call__(self, request: Request) -> Any:
        """Return the body. Raises RequestError, NotFound and Overloaded."""
        context: AppContext = request.app.state.context
        asked = await read_as(request, self._kind)
        request.state.request_id = getattr(asked, "request_id", None)
        request.state.served = context.served(asked.model)
        return _with_names(asked, context.settings.default_chat_template_kwargs)


ChatBody = Annotated[ChatRequest, Depends(BodyOf(ChatRequest))]
CompletionBody = Annotated[CompletionRequest, Depends(BodyOf(CompletionRequest))]
ResponsesBody = Annotated[ResponsesRequest, Depends(BodyOf(ResponsesRequest))]
ScoreBody = Annotated[ScoreRequest, Depends(BodyOf(ScoreRequest))]
RerankBody = Annotated[RerankRequest, Depends(BodyOf(RerankRequest))]
EmbeddingBody = Annotated[EmbeddingRequest, Depends(BodyOf(EmbeddingRequest))]
MessagesBody = Annotated[MessagesRequest, Depends(BodyOf(MessagesRequest))]
CountTokensBody = Annotated[CountTokensRequest, Depends(BodyOf(CountTokensRequest))]
TokenizeBody = Annotated[TokenizeRequest, Depends(BodyOf(TokenizeRequest))]
DetokenizeBody = Annotated[DetokenizeRequest, Depends(BodyOf(DetokenizeRequest))]


def _with_names(asked: Any, defaults: dict[str, Any]) -> Any:
    """Return `asked` with the names for every chat template, where it has no others."""
    if not defaults or not hasattr(asked, "chat_template_kwargs"):
        return asked
    if isinstance(asked, MessagesPrompt) and asked.thinking is not None:  # which is the client's word on it
        defaults = {name: value for name, value in defaults.items() if name != "enable_thinking"}
    return msgspec.structs.replace(asked, chat_template_kwargs=defaults | (asked.chat_template_kwargs or {}))


def _require_plain(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        error = RequestError(f"the body has Content-Encoding '{encoding[:200]}'; send it as plain JSON")
        error.code = "unsupported_encoding"
        raise error
