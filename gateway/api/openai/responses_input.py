"""What a client of OpenAI's Responses API asks for, as a conversation."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from contracts.errors import RequestError
from gateway.api.openai.schema import ResponsesRequest, ResponseText
from gateway.grammar.structured_outputs import JsonSchema, ResponseFormat
from gateway.json_decoding import converted, words_of
from gateway.prompting.request_fields import ChatRequest, Message
from gateway.tool_calling.tool_choice import (
    AllowedTools,
    AnyTool,
    FlatCustomTool,
    FlatTool,
    FunctionChoice,
    MadeCall,
    MadeFunction,
    NamedChoice,
    ToolChoice,
    narrowed,
)

_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_ITEMS = ("message", "reasoning", *_CALLS, *_RESULTS)
_TOOLS: dict[Any, type[FlatTool] | type[FlatCustomTool]] = {"function": FlatTool, "custom": FlatCustomTool}
_NAMES = {
    "reasoning_effort": "reasoning.effort",
    ".function.": ".",
    ".custom.format.grammar.": ".format.",
    ".custom.": ".",
    ".allowed_tools.": ".",
}
"""What a conversation calls its fields -> what they are called here."""
_NAMES_OF_FORMAT = {"response_format.json_schema": "text.format", "response_format": "text.format"}
CallId = Annotated[str, Meta(min_length=1)]


class GivenCall(msgspec.Struct, frozen=True):
    """An item of type `function_call`. `arguments`: JSON in a string."""

    call_id: CallId
    name: str
    arguments: str


class GivenCustomCall(msgspec.Struct, frozen=True):
    """An item of type `custom_tool_call`."""

    call_id: CallId
    name: str
    input: str


class GivenResult(msgspec.Struct, frozen=True):
    """An item of type `function_call_output` or `custom_tool_call_output`."""

    call_id: CallId
    output: str | list[dict[str, Any]]


def to_chat(request: ResponsesRequest) -> ChatRequest:
    """The same as a conversation. Raises RequestError on what is not text."""
    names = set(request.__struct_fields__) & set(ChatRequest.__struct_fields__)
    shared = {name: getattr(request, name) for name in names}
    given = request.input
    said = [Message(role="user", content=given)] if isinstance(given, str) else _messages(given)
    if not said:
        raise RequestError("'input' is empty", "input")
    system = [] if request.instructions is None else [Message(role="system", content=request.instructions)]
    effort = None if request.reasoning is None else request.reasoning.effort
    offered = None if request.tools is None else nested_tools(request)
    tools, choice = narrowed(offered, _choice(request))
    return ChatRequest(
        **shared
        | {
            "messages": [*system, *said],
            "max_completion_tokens": request.max_output_tokens,
            "reasoning_effort": effort,
            "tools": tools,
            "tool_choice": choice,
            "logprobs": request.wants_logprobs,
            "top_logprobs": request.top_logprobs if request.wants_logprobs else None,
            "truncate_prompt_tokens": _truncation(request),
            "response_format": _format(request.text, request.response_format),
        }
    )


def nested_tools(request: ResponsesRequest) -> list[AnyTool]:
    """Return the tools that a model here can call as chat has them. Raises RequestError."""
    places = [at for at, tool in enumerate(request.tools or ()) if tool.get("type") in _TOOLS]
    return [
        tool.nested() if isinstance(tool, FlatTool) else tool.nested(f"tools[{at}]")
        for at, tool in zip(places, honoured_tools(request), strict=True)
    ]


def honoured_tools(request: ResponsesRequest) -> list[FlatTool | FlatCustomTool]:
    """Return those that a model here can call. Raises RequestError.

    Others (web_search, mcp, ...) run at OpenAI: the client goes on without them, and finds on the response which
    there were.
    """
    honoured: list[FlatTool | FlatCustomTool] = []
    for at, tool in enumerate(request.tools or ()):
        if not isinstance(given := tool.get("type"), str):
            raise RequestError(f"tools[{at}] needs 'type', a string", f"tools[{at}].type")
        if (kind := _TOOLS.get(given)) is not None:
            honoured.append(converted(tool, kind, f"tools[{at}]"))
    return honoured


def skipped_tools(request: ResponsesRequest) -> list[str]:
    """Return the types of those that are not honoured, each once."""
    types = (str(tool.get("type"))[:64] for tool in request.tools or ())
    return [kind for kind in dict.fromkeys(types) if kind not in _TOOLS]


def named(error: RequestError, request: ResponsesRequest) -> RequestError:
    """An error of the conversation, with the names that its fields have here."""
    text, param = str(error), error.param or ""
    if param.startswith("messages"):
        return RequestError(text, "input")
    names = _NAMES if request.response_format is not None else _NAMES | _NAMES_OF_FORMAT
    for name, own in names.items():
        if name in param:
            text, param = text.replace(name, own), param.replace(name, own)
    return RequestError(text, param or None)


def _choice(request: ResponsesRequest) -> ToolChoice | None:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        tools = [tool for tool in choice.tools or () if tool.get("type", "function") in _TOOLS]
        return NamedChoice("allowed_tools", allowed_tools=AllowedTools(choice.mode or "auto", tools))
    if choice.name is None:
        raise RequestError(f"'tool_choice' of type '{choice.type}' needs 'name'", "tool_choice.name")
    return NamedChoice("function", FunctionChoice(choice.name))


def _truncation(request: ResponsesRequest) -> int | None:
    """Return the most tokens of the prompt; -1, as with vLLM, for as many as leave room for the answer."""
    is_auto = request.truncation == "auto" and request.truncate_prompt_tokens is None
    return -1 if is_auto else request.truncate_prompt_tokens


def _format(text: ResponseText | None, other: ResponseFormat | None) -> ResponseFormat | None:
    """`text.format`, or `response_format`, which vLLM takes here as well."""
    wanted = None if text is None else text.format
    if wanted is None or wanted.type == "text":
        return other
    if other is not None:
        raise RequestError("'text.format' and 'response_format' exclude each other", "response_format")
    if wanted.type == "json_object":
        return ResponseFormat("json_object")
    if wanted.schema is None:
        raise RequestError("'text.format' of type json_schema needs 'schema'", "text.format.schema")
    return ResponseFormat("json_schema", JsonSchema(wanted.schema, wanted.name, wanted.description, wanted.strict))


def _messages(items: Sequence[dict[str, Any]]) -> list[Message]:
    """Items of reasoning belong to what follows them of the assistant, calls to what it said before them."""
    messages: list[Message] = []
    thoughts: list[str] = []
    calls: dict[int, list[MadeCall]] = {}  # of a message more than one, put together once: there may be thousands
    for index, item in enumerate(items):
        at, kind = f"input[{index}]", item.get("type")
        kind = "message" if kind is None else kind  # openai's EasyInputMessage, dumped, has it as null
        if kind not in _ITEMS:
            raise RequestError(f"an item of type {kind!r} is not supported, only {', '.join(_ITEMS)}", f"{at}.type")
        if kind == "reasoning":
            thoughts.append(_reasoning_of(item, at))
            continue
        message = _message(item, kind, at)
        if kind in _CALLS and messages and messages[-1].role == "assistant" and not thoughts:
            of_last = calls.setdefault(len(messages) - 1, list(messages[-1].tool_calls or ()))
            of_last += message.tool_calls or ()
            continue
        messages.append(msgspec.structs.replace(message, reasoning="\n".join(filter(None, thoughts)) or None))
        thoughts = []
    for at, made in calls.items():
        messages[at] = msgspec.structs.replace(messages[at], tool_calls=made)
    return messages


def _message(item: dict[str, Any], kind: str, at: str) -> Message:
    if kind == "function_call":
        call = converted(item, GivenCall, at)
        made = MadeCall(MadeFunction(call.name, call.arguments), call.call_id)
        return Message(role="assistant", tool_calls=[made])
    if kind == "custom_tool_call":
        given = converted(item, GivenCustomCall, at)
        text = msgspec.json.encode({"input": given.input}).decode()
        return Message(role="assistant", tool_calls=[MadeCall(MadeFunction(given.name, text), given.call_id)])
    if kind in _RESULTS:
        result = converted(item, GivenResult, at)
        return Message(role="tool", tool_call_id=result.call_id, content=_content(result.output, f"{at}.output"))
    content = _content(item.get("content"), f"{at}.content")
    if content is None:
        raise RequestError("a message needs 'content'", f"{at}.content")
    return converted({"role": item.get("role"), "content": content}, Message, at)


def _reasoning_of(item: dict[str, Any], at: str) -> str:
    """The reasoning itself, and without it its summary."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise RequestError("'content' of reasoning must be a list of parts", f"{at}.content")
    texts = [part.get("text") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("a part of reasoning needs 'text', a string", f"{at}.content")
    return "\n".join(texts)


def _content(content: Any, at: str) -> Any:
    """Parts of text as a chat has them; what is neither a list nor text is for others to refuse."""
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": words_of(part, _PARTS, f"{at}[{index}]")} for index, part in enumerate(content)]
