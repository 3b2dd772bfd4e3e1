"""The gateway's HTTP face."""

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from checkpoint import Checkpoint
from contracts.errors import NotFound, RequestError, TandemError
from gateway.admission.limits import BodyMemoryLimit, ConcurrencyLimit
from gateway.api.openai.responses import ResponsesFormatter
from gateway.api.openai.responses_input import named, to_chat
from gateway.api.openai.schema import (
    ChatRequest,
    Common,
    CompletionRequest,
    Detailed,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
    parse,
)
from gateway.api.openapi import (
    ChatReply,
    DetokenizeReply,
    LoadReply,
    ModelCard,
    ModelList,
    ReadyReply,
    ResponseReply,
    TextReply,
    TokenizeReply,
    VersionReply,
    returns,
    takes,
)
from gateway.api.response_formatter import (
    OUR_FAULT,
    ChatFormatter,
    CompletionFormatter,
    ResponseFormatter,
    Spelling,
    error_body,
    error_of,
    retry_headers,
    spell_id,
)
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.placement import nothing_placed
from gateway.error_codes import code_of
from gateway.generation.generation_state import GenerationState
from gateway.generation.output_parser import parser_spec
from gateway.http.api_keys import ApiKeyMiddleware
from gateway.http.head_requests import HeadRequestMiddleware
from gateway.observability.metrics import Metrics
from gateway.observability.tracing import Tracing
from gateway.prompting.chat_template import Prompting
from gateway.prompting.pipeline import GenerationRequest, ServingLimits, prepare_chat, prepare_completion
from gateway.read_replies import ParsedChatFormatter
from gateway.serving.disconnect import run_until_disconnect
from gateway.serving.generation_run import GenerationResponse, GenerationRun, Style
from gateway.settings import GatewaySettings
from gateway.tool_calling.tool_choice import calling_of
from service.request_body import read_body

log = logging.getLogger("gateway.requests")

BODY_TIMEOUT_S = 30.0
MAX_WHOLE_BODIES = 64
"""So many of the longest that are allowed may be on their way at once: half a GiB of them."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass
class AppContext:
    """What the endpoints share."""

    settings: GatewaySettings
    checkpoint: Checkpoint
    prompting: Prompting
    dispatch: Dispatcher
    metrics: Metrics
    model: str
    version: str
    created: int
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        self.admission = ConcurrencyLimit(self.settings.max_inflight)
        self.bodies = BodyMemoryLimit(MAX_WHOLE_BODIES * self.settings.max_body_nbytes)

    @property
    def limits(self) -> ServingLimits:
        own = self.checkpoint.config.max_model_len
        max_model_len, max_answers = self.dispatch.workers.max_model_len(own), self.settings.max_inflight
        return ServingLimits(max_model_len, tuple(self.checkpoint.eos_token_ids), max_answers)

    def spelling(self, asked: Detailed) -> Spelling:
        return spell_id if asked.return_tokens_as_token_ids else self.prompting.token_text

    def require_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise NotFound(f"the model '{name[:200]}' does not exist; this server has '{self.model}'", "model")

    async def serve(
        self, request: Request, asked: Common, asks: list[GenerationRequest], replies: ResponseFormatter
    ) -> Response:
        eos = self.limits.eos_token_ids
        serving = GenerationRun(
            id=replies.id,
            answers=[GenerationState(ask, self.prompting, eos) for ask in asks],
            replies=replies,
            style=_style(asked),
            dispatch=self.dispatch,
            admission=self.admission,
            metrics=self.metrics,
            timeout_s=self.settings.request_timeout_s,
            started_s=request.state.started_s,
            receive_s=request.state.started_s - request.state.came_s,
            echo_id=_given_id(request),
            trace=self.tracing and self.tracing.begin(request.url.path, request.headers),
        )
        return GenerationResponse(serving)


def make_app(front: AppContext) -> FastAPI:
    app = FastAPI(title="Tandem", version=front.version, docs_url=None, redoc_url=None)
    _add_door(app, front)
    _add_errors(app, front)
    _add_generation(app, front)
    _add_responses(app, front)
    _add_tokens(app, front)
    _add_models(app, front)
    _add_state(app, front)
    return app


def _add_door(app: FastAPI, front: AppContext) -> None:
    def refuse(request: Request, why: str) -> Response:
        return _refused(front, request, 401, "unauthorized", error_body(401, why), {"WWW-Authenticate": "Bearer"})

    app.add_middleware(HeadRequestMiddleware)
    if keys := front.settings.api_key.get_secret_value():
        app.add_middleware(ApiKeyMiddleware, keys=keys, refuse=refuse)
    origins = [origin for origin in map(str.strip, front.settings.cors_origins.split(",")) if origin]
    if origins:  # outside of the keys: a browser asks beforehand, and shows none
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])


def _add_generation(app: FastAPI, front: AppContext) -> None:
    timeout_s = front.settings.request_timeout_s

    @app.post(
        "/v1/chat/completions",
        openapi_extra=takes(ChatRequest),
        responses=returns(ChatReply, streams=True),
        response_model=None,
    )
    async def chat_completions(request: Request) -> Response:
        """Answers to a conversation, whole or streamed."""
        asked = await _parsed(request, front, ChatRequest)
        asks = await run_until_disconnect(request, timeout_s, prepare_chat(asked, front.prompting, front.limits))
        head = (_request_id(request, "chatcmpl"), front.model, int(time.time()), front.prompting)
        replies = ChatFormatter(*head, bool(asked.logprobs), front.spelling(asked))
        calling = calling_of(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
        if (reading := parser_spec(front.prompting, asks[0].begun, calling)) is not None:
            replies = ParsedChatFormatter(replies, reading, asked.include_reasoning is not False)
        return await front.serve(request, asked, asks, replies)

    @app.post(
        "/v1/completions",
        openapi_extra=takes(CompletionRequest),
        responses=returns(TextReply, streams=True),
        response_model=None,
    )
    async def completions(request: Request) -> Response:
        """Continuations of one or more prompts, whole or streamed."""
        asked = await _parsed(request, front, CompletionRequest)
        asks = await run_until_disconnect(request, timeout_s, prepare_completion(asked, front.prompting, front.limits))
        head = (_request_id(request, "cmpl"), front.model, int(time.time()))
        replies = CompletionFormatter(*head, asked.logprobs is not None, front.spelling(asked))
        return await front.serve(request, asked, asks, replies)


def _add_responses(app: FastAPI, front: AppContext) -> None:
    timeout_s = front.settings.request_timeout_s

    @app.post(
        "/v1/responses",
        openapi_extra=takes(ResponsesRequest),
        responses=returns(ResponseReply, streams=True),
        response_model=None,
    )
    async def responses(request: Request) -> Response:
        """One answer in the form of the Responses API; nothing is stored."""
        asked = await _parsed(request, front, ResponsesRequest)
        chat = to_chat(asked)
        try:
            asks = await run_until_disconnect(
                request, timeout_s, prepare_chat(chat, front.prompting, front.limits, "max_output_tokens")
            )
        except RequestError as error:
            raise named(error, asked) from error
        head = (_request_id(request, "resp"), front.model, int(time.time()))
        calling = calling_of(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
        reading = parser_spec(front.prompting, asks[0].begun, calling)
        return await front.serve(request, asked, asks, ResponsesFormatter(*head, asked, asks[0].sampling, reading))


def _add_tokens(app: FastAPI, front: AppContext) -> None:
    timeout_s = front.settings.request_timeout_s

    @app.post("/tokenize", openapi_extra=takes(TokenizeRequest), responses=returns(TokenizeReply), response_model=None)
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or of a conversation."""
        asked = await _parsed(request, front, TokenizeRequest)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("give either 'prompt' or 'messages'", "prompt")
        text, special = asked.prompt, asked.add_special_tokens is not False
        if text is None:
            text = front.prompting.render(asked)
            special = bool(asked.add_special_tokens)
        [ids] = await run_until_disconnect(request, timeout_s, front.prompting.encode([text], special))
        reply = {"count": len(ids), "max_model_len": front.limits.max_model_len, "tokens": ids, "token_strs": None}
        if asked.return_token_strs:
            texts = {token_id: front.prompting.token_text(token_id) for token_id in set(ids)}
            reply["token_strs"] = list(map(texts.__getitem__, ids))
        return _json(reply)

    @app.post(
        "/detokenize", openapi_extra=takes(DetokenizeRequest), responses=returns(DetokenizeReply), response_model=None
    )
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        asked = await _parsed(request, front, DetokenizeRequest)
        front.prompting.require_known(asked.tokens, "tokens")
        [text] = await run_until_disconnect(request, timeout_s, front.prompting.decode([asked.tokens]))
        return _json({"prompt": text})


def _json(reply: dict[str, Any]) -> Response:
    """FastAPI looks at each of a million token ids by itself, which takes seconds."""
    return Response(msgspec.json.encode(reply), media_type="application/json")


def _add_models(app: FastAPI, front: AppContext) -> None:
    def card() -> dict[str, Any]:
        return {
            "id": front.model,
            "object": "model",
            "created": front.created,
            "owned_by": "tandem",
            "root": front.checkpoint.name,
            "parent": None,
            "max_model_len": front.limits.max_model_len,
            "permission": [],
        }

    @app.get("/v1/models", responses=returns(ModelList), response_model=None)
    async def models() -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{model:path}", responses=returns(ModelCard), response_model=None)
    async def model(model: str) -> dict[str, Any]:
        """One model by its id."""
        front.require_model(model)
        return card()


def _add_state(app: FastAPI, front: AppContext) -> None:
    @app.get("/health", responses=returns(None), response_class=Response)
    async def health() -> Response:
        """200 while this process answers."""
        return Response()

    @app.get("/ping", responses=returns(None), response_class=Response)
    @app.post("/ping", responses=returns(None), response_class=Response)
    async def ping() -> Response:
        """The same as /health."""
        return Response()

    @app.get("/load", responses=returns(LoadReply), response_model=None)
    async def load() -> dict[str, int]:
        """Answers in progress."""
        return {"server_load": front.admission.num_taken}

    @app.get("/ready", responses=returns(ReadyReply), response_model=None)
    async def ready() -> JSONResponse:
        """200 while a prefill and a decode worker that can exchange KV, or a mixed one, take work from this gateway,
        and the registry answers.
        """
        workers = front.dispatch.workers
        what = nothing_placed("does not answer") if workers.is_blind else workers.lack()
        if not what:
            return JSONResponse({"status": "ready"})
        why = "; ".join([what, *workers.troubles])
        return JSONResponse(error_body(503, why), status_code=503, headers={"Retry-After": "1"})

    @app.get("/metrics", responses=returns(None), response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(front.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/version", responses=returns(VersionReply), response_model=None)
    async def version() -> dict[str, str]:
        """The release that runs."""
        return {"version": front.version}


def _add_errors(app: FastAPI, front: AppContext) -> None:
    @app.exception_handler(TandemError)
    async def tandem_error(request: Request, error: TandemError) -> Response:
        status, body = error_of(error)
        headers = retry_headers(error)
        if getattr(request.state, "is_body_late", False):
            headers["Connection"] = "close"  # nobody waits for the rest of that body
        return _refused(front, request, status, error.code, body, headers)

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        why = "the client left before its body had arrived"
        _note_end(front, request, _id_of(request), 499, "disconnected", why)
        return Response(status_code=499)  # read by nobody

    @app.exception_handler(Exception)
    async def our_fault(request: Request, error: Exception) -> Response:
        return _refused(front, request, 500, TandemError.code, error_body(500, OUR_FAULT))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        headers = {"Allow": _allowed(request)} if error.status_code == 405 else error.headers
        why = _no_path(request) if error.status_code == 404 else str(error.detail)
        status = error.status_code
        return _refused(front, request, status, code_of(status), error_body(status, why), headers)


def _refused(
    front: AppContext,
    request: Request,
    status: int,
    code: str,
    body: dict[str, Any],
    headers: Mapping[str, str] | None = None,
) -> Response:
    """What is said of it, and under which id, can be found in the log."""
    request_id = _id_of(request)
    _note_end(front, request, request_id, status, code, body["error"]["message"])
    return JSONResponse(body, status, {**(headers or {}), "X-Request-Id": request_id})


def _note_end(front: AppContext, request: Request, request_id: str, status: int, code: str, message: str) -> None:
    """Of a request that no answers were begun for. It has a trace if it came to where answers are begun."""
    front.metrics.requests.labels(code).inc()
    path = request.url.path
    facts = {"id": request_id, "status": status, "code": code, "path": path[:200], "message": message[:500]}
    log.info("%s", json.dumps(facts))
    came_s = getattr(request.state, "came_s", None)
    if front.tracing is not None and came_s is not None:
        front.tracing.begin(path, request.headers).end(None, facts, came_s, time.monotonic())


def _no_path(request: Request) -> str:
    return f"the path '{request.url.path[:200]}' does not exist; GET /openapi.json lists those that do"


def _allowed(request: Request) -> str:
    """All methods of a path. Starlette names those of the first route with that path only."""
    path = request.url.path
    routes = [route for route in request.app.routes if isinstance(route, Route) and route.path_regex.match(path)]
    methods = {method for route in routes for method in route.methods or ()}
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))


async def _parsed(request: Request, front: AppContext, kind: type) -> Any:
    """A request's time begins when its body is here; that the body was on its way is a stage of its own."""
    request.state.came_s = time.monotonic()
    _require_plain(request.headers.get("content-encoding", "identity"))
    with front.bodies.arriving() as grown:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await read_body(request, front.settings.max_body_nbytes, grown)
        except TimeoutError as error:
            request.state.is_body_late = True
            raise RequestError(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from error
        request.state.started_s = time.monotonic()
        asked = parse(body, kind)
    request.state.request_id = getattr(asked, "request_id", None)
    front.require_model(asked.model)
    return asked


def _require_plain(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        error = RequestError(f"the body has Content-Encoding '{encoding[:200]}'; send it as plain JSON")
        error.code = "unsupported_encoding"
        raise error


def _style(asked: Common) -> Style:
    options = asked.stream_options
    include = bool(options and options.include_usage)
    return Style(bool(asked.stream), include, include and bool(options and options.continuous_usage_stats))


def _request_id(request: Request, prefix: str) -> str:
    """The client's own, made unique: two requests may carry the same one, and the workers tell requests by it."""
    given, unique = _given_id(request), secrets.token_hex(8)
    return f"{prefix}-{given}-{unique}" if given else f"{prefix}-{unique}"


def _id_of(request: Request) -> str:
    """Of one that has no answers: no workers, which tell requests by it."""
    return _given_id(request) or secrets.token_hex(8)


def _given_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "") or getattr(request.state, "request_id", None) or ""
    return given if _REQUEST_ID.fullmatch(given) else ""
