"""Tools that take text instead of arguments: to a model they are functions of one text, `input`.

OpenAI's tools of type `custom`, in the forms of chat and of responses.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from contracts.errors import RequestError
from gateway.grammar.field_grammar import MAX_GRAMMAR_CHARS
from gateway.tool_calling.call_parser import object_of

INPUT = "input"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


class InputGrammar(msgspec.Struct, frozen=True):
    """The grammar of a tool's input: Lark, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]


class InputFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a tool's input looks like, as chat has it."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None


class FlatInputFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The same as responses have it."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)] | None = None

    def nested(self, param: str) -> InputFormat:
        """Return it as chat has it. Raises RequestError, naming the field in `param` that is missing."""
        if self.type == "text":
            return InputFormat("text")
        for name in ("syntax", "definition"):
            if getattr(self, name) is None:
                raise RequestError(f"{param}.{name} is missing", f"{param}.{name}")
        return InputFormat("grammar", InputGrammar(self.syntax or "lark", self.definition or ""))


def described_input(description: str | None, grammar: InputGrammar | None) -> str | None:
    """Return what a model is told of a tool: its description, and the grammar of its input."""
    rules = "" if grammar is None else f"The input follows this grammar ({grammar.syntax}):\n{grammar.definition}"
    return "\n".join(filter(None, (description, rules))) or None


def input_of(arguments: str) -> str:
    """Return the input that a call's arguments hold; what has none is the input itself."""
    given = (object_of(arguments) or {}).get(INPUT)
    return given if isinstance(given, str) else arguments
