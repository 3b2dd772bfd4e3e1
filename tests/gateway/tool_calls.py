"""Tools that a model may call, and what it and its user say of such calls. Not a test."""

from tests.gateway.sayings import SAY

PARIS = '{"city": "Paris"}'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "how it is outside", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
CALL = f'<tool_call>[{{"name": "get_weather", "arguments": {PARIS}}}]</tool_call>'
TWO = f'<tool_call>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]</tool_call>'
MADE = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
HISTORY = [
    *SAY,
    {"role": "assistant", "content": None, "tool_calls": [MADE, MADE | {"id": "call_2"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "rainy"}]},
]
