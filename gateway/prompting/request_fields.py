"""The fields of a request, with their types and ranges: what every API is converted into.

What only a model can judge (vocabulary, context) is checked elsewhere.
"""

import sys
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.grammar.structured_outputs import ResponseFormat, StructuredOutputs
from gateway.tool_calling.tool_choice import MadeCalls, ToolChoice, Tools

Word = Annotated[str, Meta(min_length=1, max_length=1024)]
Text = Annotated[str, Meta(max_length=1024)]
Stop = Text | Annotated[list[Text], Meta(max_length=16)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Meta(max_length=1 << 22)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
RequestId = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$", description="letters, digits, . _ : and -, 1 to 128 of them")
]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""No infinity and no NaN, either of which may stand in quotes."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
NumLogprobs = Annotated[int, Meta(ge=0, le=20)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
PromptLimit = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""The most tokens of a prompt; -1: as many as leave room for the answer."""
Side = Literal["left", "right"]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and completions share. None: not given."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: dict[str, Finite] | None = None
    seed: Int64 | None = None
    n: Count | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[Word], Meta(max_length=256)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 20)] | None = None
    speculate: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    max_tokens: Count | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: PromptLimit | None = None
    truncation_side: Side | None = None
    priority: Int64 | None = None
    cache_salt: Word | None = None
    request_id: RequestId | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Detailed(Common, frozen=True, kw_only=True):
    """What chat and completions can tell of an answer besides its text."""

    prompt_logprobs: NumLogprobs | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of a conversation.

    `reasoning_content` is the older name of `reasoning`, what the assistant thought before it said `content`.
    `function_call`, the older form of `tool_calls`, is refused: without it the conversation would be another one.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: MadeCalls | None = None
    function_call: dict[str, Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatRequest(Detailed, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=65536)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Texts, or their token ids, whose embeddings are wanted.

    `dimensions`: only the first of each, for models that were trained for it.
    """

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: PromptLimit | None = None
    truncation_side: Side | None = None
    priority: Int64 | None = None
    cache_salt: Word | None = None
    request_id: RequestId | None = None


Texts = str | Annotated[list[str], Meta(min_length=1, max_length=256)]


class Scoring(msgspec.Struct, frozen=True, kw_only=True):
    """What requests for scores share. None: not given."""

    model: str | None = None
    truncate_prompt_tokens: PromptLimit | None = None
    truncation_side: Side | None = None
    priority: Int64 | None = None
    cache_salt: Word | None = None
    request_id: RequestId | None = None


class ScoreRequest(Scoring, frozen=True, kw_only=True):
    """Pairs of texts to score; vLLM calls them `queries` and `documents`, too."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None


class RerankRequest(Scoring, frozen=True, kw_only=True):
    """Documents to bring in the order in which they fit a query; `top_n` of them are wanted, 0 for all."""

    query: str
    documents: Annotated[list[str], Meta(min_length=1, max_length=256)]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class CompletionRequest(Detailed, frozen=True, kw_only=True):
    """`max_tokens` may be 0 with `echo`: the prompt is scored and nothing is said."""

    prompt: str | list[Any]
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
