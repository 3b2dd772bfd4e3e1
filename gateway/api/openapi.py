"""What /openapi.json says of each endpoint: the request, the reply, and what an error looks like."""

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length"] | None
ChatFinishReason = Literal["stop", "length", "tool_calls"] | None


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: int


class ErrorReply(msgspec.Struct):
    error: ErrorDetail


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


class UsageReply(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatLogprob):
    top_logprobs: list[ChatLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, tag_field="type", tag="function"):
    id: str
    function: CalledFunction


class CalledCustomTool(msgspec.Struct):
    name: str
    input: str


class CustomToolCall(msgspec.Struct, tag_field="type", tag="custom"):
    id: str
    custom: CalledCustomTool


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[ToolCall | CustomToolCall] | msgspec.UnsetType = msgspec.UNSET


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Entries by token id; null for the first token, which nothing foretells."""


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatReply(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextReply(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageReply
    system_fingerprint: str


class EmbeddingItem(msgspec.Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(msgspec.Struct):
    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class OutputText(msgspec.Struct):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: str
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(msgspec.Struct):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: str
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class OutputCustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    status: str
    call_id: str
    name: str
    input: str


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseReply(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputReasoning | OutputMessage | OutputCall | OutputCustomCall]
    usage: ResponseUsage


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(msgspec.Struct):
    thinking_tokens: int


class MessagesUsage(msgspec.Struct):
    """`input_tokens`: of the prompt, without those of `cache_read_input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | msgspec.UnsetType = msgspec.UNSET


class MessagesReply(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessagesUsage


class CountTokensReply(msgspec.Struct):
    input_tokens: int


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorReply(msgspec.Struct):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | msgspec.UnsetType = msgspec.UNSET


class RenderReply(msgspec.Struct):
    """A prompt as an answer to it would begin; what is null is of vLLM's pictures and remote caches."""

    request_id: str
    token_ids: list[int]
    token_offsets: None
    features: None
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: dict[str, bool | None] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(msgspec.Struct):
    prompt: str


class ScoreEntry(msgspec.Struct):
    index: int
    object: Literal["score"]
    score: float


class ScoresReply(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreEntry]
    usage: EmbeddingUsage


class RankedText(msgspec.Struct):
    text: str


class RankedDocument(msgspec.Struct):
    index: int
    document: RankedText
    relevance_score: float


class RerankReply(msgspec.Struct):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedDocument]


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[Any]


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class ReadyReply(msgspec.Struct):
    status: Literal["ready"]


class VersionReply(msgspec.Struct):
    version: str


class LoadReply(msgspec.Struct):
    server_load: int


def takes(kind: type) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is a `kind`."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(kind)}}}}


def returns(kind: Any, *, streams: bool = False, error: type = ErrorReply) -> dict[int | str, dict[str, Any]]:
    """Return `responses` of a route that answers with a `kind`, or with no JSON at all."""
    content = {} if kind is None else {"application/json": {"schema": schema_of(kind)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    errors = {"description": "Error", "content": {"application/json": {"schema": schema_of(error)}}}
    return {200: {"description": "OK", "content": content}, "default": errors}


def schema_of(kind: Any) -> dict[str, Any]:
    (schema,), parts = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    return _inlined(schema, parts)


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
    return {key: _inlined(value, parts) for key, value in schema.items()}
