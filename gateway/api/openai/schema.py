"""The requests of OpenAI's API as JSON, and those that are no conversation or completion yet.

The fields of chats and completions are in gateway.prompting.request_fields; json_decoding checks their types.
"""

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from contracts.errors import RequestError
from gateway.api.openai.unsupported_fields import (
    REFUSED,
    REFUSED_OF_COMPLETIONS,
    REFUSED_OF_RESPONSES,
    refuse_unhonoured,
)
from gateway.json_decoding import Kind, converted
from gateway.prompting.request_fields import Common, CompletionRequest, Count, Effort, Message, NumLogprobs, TokenIds
from gateway.tool_calling.tool_choice import FlatToolChoice, FlatTools, Tools


class ResponseReasoning(msgspec.Struct, frozen=True):
    """`summary` is ignored: the reasoning itself comes."""

    effort: Effort | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """`strict` as in JsonSchema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseText(msgspec.Struct, frozen=True):
    """`verbosity` is ignored, as it is of a chat."""

    format: TextFormat | None = None
    verbosity: str | None = None


LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""What more a response may tell. But for the first it is of items that never come here, or that come whole anyway."""


class ResponsesRequest(Common, frozen=True, kw_only=True):
    """A request of the Responses API.

    `metadata`: the caller's notes, which come back on the response. `max_tool_calls` limits calls of OpenAI's own
    tools, of which there are none here.
    """

    input: str | Annotated[list[dict[str, Any]], Meta(max_length=65536)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    reasoning: ResponseReasoning | None = None
    text: ResponseText | None = None
    tools: FlatTools | None = None
    tool_choice: FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    include: list[Included] | None = None
    top_logprobs: NumLogprobs | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=65536)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    reasoning_effort: Effort | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    tokens: TokenIds
    model: str | None = None


AdapterName = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter to load: its name, and its folder as the workers see it."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: AdapterName


_REFUSED_OF = {CompletionRequest: REFUSED_OF_COMPLETIONS, ResponsesRequest: REFUSED_OF_RESPONSES}


def parse(body: bytes, kind: type[Kind]) -> Kind:
    """Return `body` as a `kind`. Raises RequestError naming the field.

    Invalid UTF-8, NaN, deep nesting and lone surrogates are errors too.
    """
    fields = _json_object(body)
    refuse_unhonoured(fields, _refused_of(kind))
    return converted(fields, kind)


@cache
def _refused_of(kind: type[msgspec.Struct]) -> Mapping[str, tuple[Any, ...]]:
    """Return the fields that a `kind` refuses: `documents` of a chat, say, and not those of scores."""
    others = {name: neutrals for name, neutrals in REFUSED.items() if name not in kind.__struct_fields__}
    return others | dict(_REFUSED_OF.get(kind, {}))


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
        if b"\\u" in body:
            msgspec.json.encode(fields)  # a lone surrogate, written as an escape, is no text
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except msgspec.ValidationError as error:  # of a number, whose field it does not name
        raise _out_of_range(body) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    return fields


def _out_of_range(body: bytes) -> RequestError:
    try:
        place = next(_too_large(json.loads(body, parse_int=float)), None) or None
    except RecursionError:
        return RequestError("the body is nested too deeply")
    return RequestError(f"{place}: number out of range" if place else "number out of range", place)


def _too_large(value: Any, at: str = "") -> Iterator[str]:
    """Yield where in a request there are numbers that no float holds.

    Others, of which there may be millions, are passed over where they are.
    """
    if isinstance(value, dict):
        for name, field in value.items():
            if _may_be_large(field):
                yield from _too_large(field, f"{at}.{name}".removeprefix("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if _may_be_large(item):
                yield from _too_large(item, f"{at}[{index}]")
    elif _may_be_large(value):
        yield at


def _may_be_large(value: Any) -> bool:
    return math.isinf(value) if isinstance(value, float) else isinstance(value, dict | list)
