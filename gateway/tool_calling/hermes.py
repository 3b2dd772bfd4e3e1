"""Hermes 2 and 3, Qwen 2.5 and 3: `<tool_call>`, a JSON object, `</tool_call>`; once for each call.

https://qwen.readthedocs.io/en/latest/framework/function_call.html

Here are the markers; call_parser reads what is between them.
"""

import re
from dataclasses import replace

from gateway.tool_calling.call_parser import CallParser
from gateway.tool_calling.tool_format import ToolFormat


class HermesParser(CallParser):
    opening = "<tool_call>"
    closing = "</tool_call>"


FORM = ToolFormat(
    parser=HermesParser,
    begin="<tool_call>\n",
    join="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
)


def form_of(template: str) -> ToolFormat:
    """Hermes 2 Pro and 3 spell tools out, each field as text; others show them as JSON."""
    return replace(FORM, needs_all_fields=re.search(r"\btool(\.function)?\.description\b", template) is not None)
