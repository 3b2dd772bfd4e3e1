"""Messages as chat templates know them: dicts of text, with calls whose arguments are objects."""

from typing import Any

import msgspec

from contracts.errors import RequestError
from gateway.json_decoding import words_of
from gateway.prompting.request_fields import Message
from gateway.tool_calling.past_call_arguments import arguments_of, is_text
from gateway.tool_calling.tool_choice import MadeCall

PlainMessage = dict[str, Any]

_PARTS = {"text": "text", "refusal": "refusal"}


def plain_message(index: int, message: Message, joint: str) -> PlainMessage:
    """Return the message as a dict with `role`, `content`, and `tool_calls` and `reasoning` if it has any.

    `joint` stands between its parts. Raises RequestError that names the place in `messages`.
    """
    at = f"messages[{index}]"
    if message.function_call is not None:
        raise RequestError("'function_call' is not supported; use 'tool_calls' instead", f"{at}.function_call")
    if message.tool_calls and message.role != "assistant":
        raise RequestError("only a message of the assistant has 'tool_calls'", f"{at}.tool_calls")
    if message.role == "tool" and not message.tool_call_id:
        raise RequestError("a message of role 'tool' needs 'tool_call_id'", f"{at}.tool_call_id")
    content = "" if message.content is None and message.role == "assistant" else message.content
    if isinstance(content, list):
        content = joint.join(words_of(part, _PARTS, f"{at}.content[{number}]") for number, part in enumerate(content))
    if content is None:
        raise RequestError("a message needs 'content'", f"{at}.content")
    calls = [_made(call, f"{at}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls or ())]
    thought = (message.reasoning or message.reasoning_content or None) if message.role == "assistant" else None
    said = msgspec.structs.replace(message, tool_calls=None, reasoning=thought, reasoning_content=None)
    plain = msgspec.to_builtins(said) | {"content": content}
    return plain | ({"tool_calls": calls} if calls else {})


def _made(call: MadeCall, param: str) -> dict[str, Any]:
    """Return the call as chat templates know one: with arguments that are an object."""
    function = call.called(param)
    given, at = function.arguments, f"{param}.function.arguments"
    if call.type == "custom":
        at = f"{param}.custom.input"
    arguments = arguments_of(given) if isinstance(given, str) else given
    if not is_text(arguments):
        raise RequestError(f"{at} has half of a surrogate pair in it, which is no text", at)
    return {"id": call.id, "type": "function", "function": {"name": function.name, "arguments": arguments}}
