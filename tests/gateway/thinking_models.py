"""Models that think aloud: their templates, and what they write of a thought, an answer and a call. Not a test."""

from collections.abc import Sequence
from typing import Any

PARIS = '{"city":"Paris"}'
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}{% for call in m.tool_calls %}<tool_call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{{ tools }}{% if add_generation_prompt %}<|im_start|>assistant\n"
)
HYBRID = TURNS + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
ALWAYS = TURNS + "<think>\n{% endif %}"
CHANNELS = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>{% if tools %}"
    "<|start|>developer<|message|>{% for t in tools %}// {{ '' + t.function.description }}\n"
    "type {{ t.function.name }}\n{% endfor %}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% if 'thinking' in m %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}{% if m.tool_calls %}<|start|>assistant<|channel|>commentary to=functions."
    "{{ m.tool_calls[0].function.name }} json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""The template of gpt-oss, with other words and another form of tools."""

THOUGHT, SAID = "We need\nthe weather.", "It is sunny: 日本."
TAGGED = f"<think>\n{THOUGHT}\n</think>\n\n"
TAGGED_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
ANALYSIS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CHANNEL_CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}"


def added_up(choices: Sequence[dict[str, Any]], name: str) -> str:
    """What one field of a streamed choice comes to."""
    return "".join(choice["delta"].get(name) or "" for choice in choices)
