"""Tools for a chat template that knows none: told in words, calls and results told as text."""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from gateway.tool_calling.tool_format import ToolFormat

_WORDS = """You can call functions. These are known, each described as JSON within <tools></tools>:
<tools>{tools}</tools>
To call one or more of them, answer with nothing but the calls, in exactly this form:
{example}
If no call is needed, answer in plain words."""
_EXAMPLE = [("function_name", '{"argument": "value"}')]


def plain_messages(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], form: ToolFormat
) -> list[dict[str, Any]]:
    """The conversation in messages of text alone.

    Each has `content`; calls have their arguments as objects.
    """
    plain: list[dict[str, Any]] = []
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        some = list(group)
        plain += [_results(some)] if is_result else [_spelled(message, form) for message in some]
    return _with_system(plain, _words(tools, form)) if tools else plain


def _results(messages: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Results that come together are one message, since many templates want roles to alternate."""
    results = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in messages)
    return {"role": "user", "content": "\n".join(results)}


def _spelled(message: dict[str, Any], form: ToolFormat) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    functions = (call["function"] for call in message["tool_calls"])
    calls = form.spell([(f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in functions])
    content = f"{message['content']}\n{calls}" if message["content"] else calls
    return {"role": message["role"], "content": content}


def _words(tools: Sequence[dict[str, Any]], form: ToolFormat) -> str:
    return _WORDS.format(tools=json.dumps(list(tools), ensure_ascii=False), example=form.spell(_EXAMPLE))


def _with_system(messages: list[dict[str, Any]], words: str) -> list[dict[str, Any]]:
    if not messages or messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": words}, *messages]
    first = messages[0] | {"content": f"{messages[0]['content']}\n\n{words}"}
    return [first, *messages[1:]]
