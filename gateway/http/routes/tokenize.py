"""Text to token ids, and back."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from contracts.errors import RequestError
from gateway.api.openai.schema import DetokenizeRequest, TokenizeRequest
from gateway.api.openapi import DetokenizeReply, TokenizeReply, returns, takes
from gateway.http.context import AppContext
from gateway.http.request_reading import DetokenizeBody, TokenizeBody
from gateway.serving.disconnect import run_until_disconnect

router = APIRouter()


@router.post("/tokenize", openapi_extra=takes(TokenizeRequest), responses=returns(TokenizeReply), response_model=None)
async def tokenize(request: Request, asked: TokenizeBody) -> Response:
    """Token ids of a prompt or of a conversation."""
    context: AppContext = request.app.state.context
    prompting, timeout_s = context.prompting, context.settings.request_timeout_s
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("give either 'prompt' or 'messages'", "prompt")
    text, special = asked.prompt, asked.add_special_tokens is not False
    if text is None:
        text = prompting.render(asked)
        special = bool(asked.add_special_tokens)
    [ids] = await run_until_disconnect(request, timeout_s, prompting.encode([text], special))
    reply = {"count": len(ids), "max_model_len": context.limits.max_model_len, "tokens": ids, "token_strs": None}
    if asked.return_token_strs:
        texts = {token_id: prompting.tokenizer.id_to_token(token_id) or "" for token_id in set(ids)}
        reply["token_strs"] = list(map(texts.__getitem__, ids))
    return _json(reply)


@router.post(
    "/detokenize", openapi_extra=takes(DetokenizeRequest), responses=returns(DetokenizeReply), response_model=None
)
async def detokenize(request: Request, asked: DetokenizeBody) -> Response:
    """The text of token ids."""
    context: AppContext = request.app.state.context
    context.prompting.require_known(asked.tokens, "tokens")
    decoding = context.prompting.decode([asked.tokens])
    [text] = await run_until_disconnect(request, context.settings.request_timeout_s, decoding)
    return _json({"prompt": text})


def _json(reply: dict[str, Any]) -> Response:
    """Return `reply` as it is: FastAPI takes seconds to look at each of a million token ids."""
    return Response(msgspec.json.encode(reply), media_type="application/json")
