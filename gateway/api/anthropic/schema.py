"""The requests of Anthropic's Messages API as JSON."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.prompting.request_fields import Count, Int64, RequestId, Text, Word
from gateway.tool_calling.tool_choice import FunctionName

Blocks = list[dict[str, Any]]

REFUSED_OF_MESSAGES: Mapping[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": ()}
"""Fields that would change the answer and are not honoured, with the values that mean the same as leaving them out."""


class GivenMessage(msgspec.Struct, frozen=True):
    """A message of a conversation; a list is of content blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class GivenTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the client runs; its `type` is left out or `custom`.

    `strict`: arguments are held to the schema though no call is asked for.
    """

    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class GivenToolChoice(msgspec.Struct, frozen=True):
    """What has to be called; `name` with `type` of `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    """Whether to think first.

    `budget_tokens` is a wish that no model here knows: `max_tokens` ends an answer.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """A form that the answer has to have."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    """How much effort to make, and the answer's form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt is made of. None: not given.

    `chat_template_kwargs` is for the chat template, as with the other APIs here.
    """

    messages: Annotated[list[GivenMessage], Meta(min_length=1, max_length=65536)]
    model: str | None = None
    system: str | Blocks | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=1024, description="of type custom")] | None = None
    tool_choice: GivenToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    container: str | dict[str, Any] | None = None


class CountTokensRequest(MessagesPrompt, frozen=True, kw_only=True):
    """A prompt whose tokens are to be counted."""


class MessagesRequest(MessagesPrompt, frozen=True, kw_only=True):
    """A prompt that is to be answered. The last three are those of the other APIs here."""

    max_tokens: Count
    stop_sequences: Annotated[list[Text], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    priority: Int64 | None = None
    cache_salt: Word | None = None
    request_id: RequestId | None = None
