"""What a chat template can show, found by rendering small conversations with it when it is loaded."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.prompting.template_program import TemplateProgram, TemplateRefusal

_TAKES_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+\w+(?:\.content\b|\[\s*['\"]content['\"]\s*\])")
"""A loop over the parts of a message, which joins them as the template likes."""
_NAMES_DEVELOPER = re.compile(r"['\"]developer['\"]")

_OFFERED, _FIRST, _SECOND, _WORDS = "probe_tool", "probe_alpha", "probe_beta", "Beforehand words"
_TOOL = {
    "type": "function",
    "function": {
        "name": _OFFERED,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "Any."}}},
    },
}
_USER = {"role": "user", "content": "Question"}


@dataclass(frozen=True)
class TemplateFeatures:
    """The parts of a conversation that a template shows.

    `part_separator` stands between the parts of a message, as vLLM has it. `text_beside_calls`: whether a message
    of the assistant shows its text and its calls.
    """

    tools: bool
    developer: bool
    several_calls: bool
    text_beside_calls: bool
    part_separator: str


def probe(template: TemplateProgram, names: dict[str, Any]) -> TemplateFeatures:
    """Return what the template shows.

    `names`: the variables that each rendering gets, such as `bos_token`.
    """

    def shown(messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None = None) -> str:
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        try:
            return template.render(names | given)
        except TemplateRefusal:
            return ""

    shows_tools = "tools" in template.names and _OFFERED in shown([_USER], [_TOOL])
    tools = [_TOOL] if shows_tools else None
    one, two = shown(_called(_FIRST), tools), shown(_called(_FIRST, _SECOND), tools)
    return TemplateFeatures(
        tools=shows_tools,
        developer=_NAMES_DEVELOPER.search(template.source) is not None,
        several_calls=_FIRST not in one or (_FIRST in two and _SECOND in two),
        text_beside_calls=_FIRST not in one or _WORDS in shown(_called(_FIRST, text=_WORDS), tools),
        part_separator="" if _TAKES_PARTS.search(template.source) else "\n",
    )


def _called(*names: str, text: str = "") -> list[dict[str, Any]]:
    """Return a conversation in which the assistant called functions of these names."""
    calls = [
        {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": {"key": "value"}}}
        for number, name in enumerate(names)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "Result"}
        for call in calls
    ]
    return [_USER, {"role": "assistant", "content": text, "tool_calls": calls}, *results]
