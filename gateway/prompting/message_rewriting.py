"""A conversation in other messages that say the same, for chat templates that don't show it as it is."""

from collections.abc import Iterator, Sequence

from gateway.prompting.plain_messages import PlainMessage
from gateway.prompting.template_features import TemplateFeatures

SYSTEM = ("system", "developer")


def with_known_roles(messages: Sequence[PlainMessage], features: TemplateFeatures) -> Sequence[PlainMessage]:
    """Return the conversation with `system` for `developer` where the template has no word for that.

    Several are one at the front then, as with vLLM and llama.cpp.
    """
    if features.developer or all(message["role"] != "developer" for message in messages):
        return messages
    return folded([message | {"role": "system"} if message["role"] == "developer" else message for message in messages])


def with_single_calls(messages: Sequence[PlainMessage]) -> Sequence[PlainMessage]:
    """Return the conversation with one call in each message, its result behind it."""
    if all(len(message.get("tool_calls", ())) < 2 for message in messages):
        return messages
    rewritten: list[PlainMessage] = []
    at = 0
    while at < len(messages):
        message, results, at = messages[at], [], at + 1
        if len(message.get("tool_calls", ())) < 2:
            rewritten.append(message)
            continue
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        rewritten += _one_by_one(message, results)
    return rewritten


def with_text_apart(messages: Sequence[PlainMessage]) -> Sequence[PlainMessage]:
    """Return the conversation with what was said beside a call in a message of its own before it."""
    return [part for message in messages for part in _apart(message)]


def with_text_later(messages: Sequence[PlainMessage]) -> Sequence[PlainMessage]:
    """Return the conversation with what was said beside a call in front of the next words of that turn.

    Templates that want user and assistant to alternate show it so. Where no words follow it comes before the call.
    """
    rewritten: list[PlainMessage] = []
    for message in reversed(messages):
        later = next((at for at, other in enumerate(rewritten) if _is_said(other)), None)
        if "tool_calls" not in message or not message["content"]:
            rewritten.insert(0, message)
        elif later is None or any(other["role"] == "user" for other in rewritten[:later]):
            rewritten[:0] = _apart(message)
        else:
            rewritten[later] = rewritten[later] | {"content": f"{message['content']}\n\n{rewritten[later]['content']}"}
            rewritten.insert(0, message | {"content": ""})
    return rewritten


def foldings(messages: Sequence[PlainMessage]) -> Iterator[Sequence[PlainMessage]]:
    """Yield the conversation, then with one system message at the front, then within the user's first."""
    yield messages
    if all(message["role"] not in SYSTEM for message in messages):
        return
    in_front = folded(messages)
    if in_front is not messages:
        yield in_front
    first, *others = in_front
    user = next((at for at, message in enumerate(others) if message["role"] == "user"), None)
    if user is not None:
        others[user] = others[user] | {"content": f"{first['content']}\n\n{others[user]['content']}"}
        yield others


def folded(messages: Sequence[PlainMessage]) -> Sequence[PlainMessage]:
    """Return the conversation with one message at the front for all of role `system` or `developer`."""
    system = [message for message in messages if message["role"] in SYSTEM]
    if not system or (len(system) == 1 and messages[0] is system[0]):
        return messages
    first = system[0] | {"content": "\n\n".join(message["content"] for message in system if message["content"])}
    return [first, *(message for message in messages if message["role"] not in SYSTEM)]


def _one_by_one(message: PlainMessage, results: list[PlainMessage]) -> Iterator[PlainMessage]:
    """Yield a message for each call, and what came of it; results of no call come last."""
    left = list(results)
    for number, call in enumerate(message["tool_calls"]):
        own = [result for result in left if result.get("tool_call_id") == call["id"]]
        left = [result for result in left if result not in own]
        said = message if number == 0 else {"role": "assistant", "content": ""}
        yield said | {"tool_calls": [call]}
        yield from own
    yield from left


def _is_said(message: PlainMessage) -> bool:
    return message["role"] == "assistant" and "tool_calls" not in message


def _apart(message: PlainMessage) -> Iterator[PlainMessage]:
    if "tool_calls" not in message or not message["content"]:
        yield message
        return
    yield {name: value for name, value in message.items() if name != "tool_calls"}
    yield {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
