"""What a client of Anthropic's Messages API asks for, as a conversation."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from contracts.errors import RequestError
from gateway.api.anthropic.schema import (
    REFUSED_OF_MESSAGES,
    Blocks,
    GivenMessage,
    GivenTool,
    MessagesPrompt,
    MessagesRequest,
)
from gateway.api.openai.unsupported_fields import refuse_unhonoured
from gateway.grammar.structured_outputs import JsonSchema, ResponseFormat
from gateway.json_decoding import converted, words_of
from gateway.prompting.request_fields import ChatRequest, Message
from gateway.tool_calling.tool_choice import (
    AnyTool,
    Function,
    FunctionChoice,
    MadeCall,
    MadeFunction,
    NamedChoice,
    Tool,
    ToolChoice,
)

_TEXT = {"text": "text"}
_THOUGHTS = {"thinking": "thinking"}
_CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    ".function.parameters": ".input_schema",
    ".function.": ".",
}
"""What a conversation calls its fields -> what they are called here."""
_MESSAGE = re.compile(r"messages\[(\d+)\]")
Id = Annotated[str, Meta(min_length=1)]


class GivenUse(msgspec.Struct, frozen=True):
    """A block of type `tool_use`."""

    id: Id
    name: str
    input: dict[str, Any]


class GivenToolResult(msgspec.Struct, frozen=True):
    """A block of type `tool_result`. What failed says so in its content."""

    tool_use_id: Id
    content: str | Blocks | None = None


@dataclass(frozen=True)
class GivenConversation:
    """A request as a chat; `places`: where the client wrote each of its messages."""

    chat: ChatRequest
    places: tuple[str, ...]

    def named(self, error: RequestError) -> RequestError:
        """Return an error of the chat with the names and places that its fields have here."""
        text, param = str(error), error.param or ""
        own = _MESSAGE.sub(self._place, param)
        for name, given in _NAMES.items():
            own = own.replace(name, given)
        own = "stop_sequences" if own == "stop" else own
        return RequestError(text.replace(param, own) if param else text, own or None)

    def _place(self, found: re.Match[str]) -> str:
        index = int(found[1])
        return self.places[index] if index < len(self.places) else found[0]


def to_conversation(request: MessagesPrompt) -> GivenConversation:
    """Return the same as a conversation. Raises RequestError on what is not text, a call or its result."""
    refuse_unhonoured(msgspec.structs.asdict(request), REFUSED_OF_MESSAGES)
    placed, tools = list(_messages(request)), _tools(request)
    choice, thinking = request.tool_choice, request.thinking
    config = request.output_config
    wanted = None if config is None or config.format is None else JsonSchema(config.format.schema, "answer")
    is_open = request.messages[-1].role == "assistant"
    if is_open and placed[-1][0].tool_calls:
        why = "the last message of the assistant calls tools, and can't be gone on with: their results come next"
        raise RequestError(f"{placed[-1][1]}: {why}", placed[-1][1])
    names = dict(request.chat_template_kwargs or {})
    if thinking is not None:
        names.setdefault("enable_thinking", thinking.type != "disabled")
    chat = ChatRequest(
        messages=[message for message, _ in placed],
        tools=None if choice is not None and choice.type == "none" else tools,
        tool_choice=_choice(request),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        reasoning_effort=None if config is None else config.effort,
        response_format=None if wanted is None else ResponseFormat("json_schema", wanted),
        chat_template_kwargs=names or None,
        add_generation_prompt=not is_open,
        continue_final_message=is_open,
        **_sampling(request),
    )
    return GivenConversation(chat, tuple(place for _, place in placed))


def tells_thoughts(request: MessagesPrompt) -> bool:
    """Return whether the client wants what the model thinks, as it does unless it says otherwise."""
    thinking = request.thinking
    return thinking is None or (thinking.type != "disabled" and thinking.display != "omitted")


def _sampling(request: MessagesPrompt) -> dict[str, Any]:
    if not isinstance(request, MessagesRequest):
        return {}
    shared = ("model", "temperature", "top_p", "top_k", "stream", "priority", "cache_salt", "request_id")
    own = {"stop": request.stop_sequences, "max_completion_tokens": request.max_tokens}
    return {name: getattr(request, name) for name in shared} | own


def _tools(request: MessagesPrompt) -> list[AnyTool] | None:
    if request.tools is None:
        return None
    return [_tool(tool, f"tools[{at}]") for at, tool in enumerate(request.tools)]


def _tool(tool: dict[str, Any], at: str) -> Tool:
    if (kind := tool.get("type")) not in (None, "custom"):
        why = f"a tool of type {str(kind)[:64]!r} is not supported, only 'custom' with an 'input_schema'"
        raise RequestError(f"{at}: {why}", f"{at}.type")
    given = converted(tool, GivenTool, at)
    return Tool(Function(given.name, given.description, given.input_schema, given.strict))


def _choice(request: MessagesPrompt) -> ToolChoice | None:
    choice = request.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise RequestError("'tool_choice' of type 'tool' needs 'name'", "tool_choice.name")
    return NamedChoice("function", FunctionChoice(choice.name))


def _messages(request: MessagesPrompt) -> Iterator[tuple[Message, str]]:
    """Yield the conversation, and the place of each message in the request."""
    if request.system:
        yield Message(role="system", content=_texts(request.system, "system")), "system"
    for index, message in enumerate(request.messages):
        at = f"messages[{index}]"
        if isinstance(message.content, str):
            yield Message(role=message.role, content=message.content), at
        elif message.role == "assistant":
            yield _said(message.content, f"{at}.content"), at
        elif message.role == "system":
            yield Message(role="system", content=_texts(message.content, f"{at}.content")), at
        else:
            for part in _asked(message, f"{at}.content"):
                yield part, at


def _asked(message: GivenMessage, at: str) -> Iterator[Message]:
    """Yield the results of calls as messages of their own, and what the user says between them."""
    words: Blocks = []
    for index, block in enumerate(message.content):
        assert isinstance(block, dict)
        if block.get("type") != "tool_result":
            words.append({"type": "text", "text": words_of(block, _TEXT, f"{at}[{index}]")})
            continue
        if words:
            yield Message(role="user", content=words)
            words = []
        result = converted(block, GivenToolResult, f"{at}[{index}]")
        told = _texts(result.content or "", f"{at}[{index}].content")
        yield Message(role="tool", tool_call_id=result.tool_use_id, content=told)
    if words or not message.content:
        yield Message(role="user", content=words)


def _said(blocks: Blocks, at: str) -> Message:
    """Return what the assistant thought, said and called.

    Thoughts that only Anthropic can read are passed over.
    """
    words: Blocks = []
    thoughts: list[str] = []
    calls: list[MadeCall] = []
    for index, block in enumerate(blocks):
        place, kind = f"{at}[{index}]", block.get("type")
        if kind == "tool_use":
            use = converted(block, GivenUse, place)
            calls.append(MadeCall(MadeFunction(use.name, use.input), use.id))
        elif kind == "thinking":
            thoughts.append(words_of(block, _THOUGHTS, place))
        elif kind != "redacted_thinking":
            words.append({"type": "text", "text": words_of(block, _TEXT, place)})
    thought = "\n".join(filter(None, thoughts)) or None
    return Message(role="assistant", content=words or None, tool_calls=calls or None, reasoning=thought)


def _texts(content: str | Blocks, at: str) -> str | Blocks:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": words_of(block, _TEXT, f"{at}[{index}]")} for index, block in enumerate(content)]
