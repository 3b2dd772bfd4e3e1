"""What a client says of tools: the fields of a chat request, and what they come to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from contracts.errors import RequestError
from gateway.tool_calling.custom_tools import (
    INPUT,
    PARAMETERS,
    FlatInputFormat,
    InputFormat,
    InputGrammar,
    described_input,
)

# Python's $ lets a newline follow; the lookahead does not.
FunctionName = Annotated[
    str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)", description="letters, digits, _ and -, 1 to 64 of them")
]


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    """`parameters`: a JSON schema of an object; without it the function takes none."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFunction(Function, frozen=True, kw_only=True):
    """A tool that takes text, as the function that it is to a model.

    `input_grammar`: what the text has to follow.
    """

    input_grammar: InputGrammar | None = None


class Tool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    function: Function


class CustomDefinition(msgspec.Struct, frozen=True):
    """The definition of a tool that takes text."""

    name: FunctionName
    description: str | None = None
    format: InputFormat | None = None


class CustomTool(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    """A tool that takes text."""

    custom: CustomDefinition

    @property
    def function(self) -> CustomFunction:
        """Return the function that it is to a model."""
        grammar = None if self.custom.format is None else self.custom.format.grammar
        words = described_input(self.custom.description, grammar)
        return CustomFunction(self.custom.name, words, PARAMETERS, input_grammar=grammar)


class FlatTool(Function, frozen=True, kw_only=True, omit_defaults=False):
    """A function as the Responses API has it."""

    type: Literal["function"]

    def nested(self) -> Tool:
        return Tool(Function(self.name, self.description, self.parameters, self.strict))


class FunctionChoice(msgspec.Struct, frozen=True):
    name: str


class FlatCustomTool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool that takes text, as the Responses API has it."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: FlatInputFormat | None = None

    def nested(self, at: str) -> CustomTool:
        """Return it as chat has it. Raises RequestError, naming a field in `at` that is missing."""
        form = None if self.format is None else self.format.nested(f"{at}.format")
        return CustomTool(CustomDefinition(self.name, self.description, form))


class FlatChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool that is to be called, or those that may be, as the Responses API names them."""

    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class AllowedTools(msgspec.Struct, frozen=True):
    """`tools`: as they are named in a choice, `{"type": "function", "function": {"name": ...}}`."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class NamedChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool that is to be called, or those that may be."""

    type: Literal["function", "custom", "allowed_tools"]
    function: FunctionChoice | None = None
    custom: FunctionChoice | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class MadeFunction(msgspec.Struct, frozen=True):
    """`arguments`: JSON in a string; vLLM takes an object as well."""

    name: str
    arguments: str | dict[str, Any] = ""


class MadeInput(msgspec.Struct, frozen=True):
    """The call of a tool that takes text."""

    name: str
    input: str


class MadeCall(msgspec.Struct, frozen=True):
    """A call that an assistant's message tells of: of a function, or of a tool that takes text."""

    function: MadeFunction | None = None
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    custom: MadeInput | None = None

    def called(self, param: str) -> MadeFunction:
        """Return it as a function's. Raises RequestError, naming the field in `param` that is missing."""
        if self.type == "custom" and self.custom is not None:
            return MadeFunction(self.custom.name, {INPUT: self.custom.input})
        if self.type == "function" and self.function is not None:
            return self.function
        raise RequestError(f"{param}.{self.type} is missing", f"{param}.{self.type}")


AnyTool = Tool | CustomTool
Tools = Annotated[list[AnyTool], Meta(max_length=1024)]
FlatTools = Annotated[
    list[dict[str, Any]], Meta(max_length=1024, description="of type function or custom; others are skipped")
]
FlatToolChoice = Literal["none", "auto", "required"] | FlatChoice
MadeCalls = Annotated[list[MadeCall], Meta(max_length=1024)]


@dataclass(frozen=True)
class Calling:
    """The calls that an answer may make: `functions` by their place in `tools`, whether it has to."""

    functions: dict[int, Function]
    must: bool = False
    in_parallel: bool = True


def narrowed(
    tools: Sequence[AnyTool] | None, choice: ToolChoice | None
) -> tuple[Sequence[AnyTool] | None, ToolChoice | None]:
    """Return the tools that `choice` allows, and the choice among them.

    Raises RequestError, naming the field.

    The model sees the allowed ones only: it does not hear of what it is not to call.
    """
    if not isinstance(choice, NamedChoice):
        return tools, choice
    part = getattr(choice, choice.type)
    if part is None:
        raise RequestError(f"'tool_choice' of type '{choice.type}' needs '{choice.type}'", f"tool_choice.{choice.type}")
    if isinstance(part, FunctionChoice):
        return tools, choice
    names = {tool.function.name for tool in tools or ()}
    allowed = [_allowed_name(entry, f"tool_choice.allowed_tools.tools[{at}]") for at, entry in enumerate(part.tools)]
    if unknown := next((name for name in allowed if name not in names), None):
        why = f"'tool_choice' allows '{unknown[:64]}', which is none of the tools"
        raise RequestError(why, "tool_choice.allowed_tools.tools")
    return [tool for tool in tools or () if tool.function.name in allowed], part.mode


def _allowed_name(entry: dict[str, Any], param: str) -> str:
    function = entry.get("function", entry.get("custom", entry))
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"{param} names no function", param)
    return name


def calling_of(tools: Sequence[AnyTool] | None, choice: ToolChoice | None, in_parallel: bool | None) -> Calling | None:
    """None: the answer is not to call. Raises RequestError, naming the field."""
    functions = {index: tool.function for index, tool in enumerate(tools or ())}
    _require_sound(functions)
    if not functions and not (choice is None or choice in ("none", "auto")):
        raise RequestError("'tool_choice' needs 'tools'", "tool_choice")
    if not functions or choice == "none":
        return None
    if isinstance(choice, NamedChoice) and (named := choice.function or choice.custom) is not None:
        wanted = _named(functions, named.name, f"tool_choice.{choice.type}.name")
        return Calling(wanted, must=True, in_parallel=False)
    return Calling(functions, must=choice == "required", in_parallel=in_parallel is not False)


def schema_of(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments."""
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return function.parameters | {"type": "object"}


def described(tool: AnyTool, needs_all_fields: bool = False) -> dict[str, Any]:
    """Return a tool as chat templates know it, without what concerns the server alone."""
    given = tool.function
    shown = Function(given.name, given.description, given.parameters)
    plain: dict[str, Any] = {"type": "function", "function": msgspec.to_builtins(shown)}
    if needs_all_fields:
        plain["function"].setdefault("description", "")
        plain["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return plain


def _require_sound(functions: dict[int, Function]) -> None:
    first: dict[str, int] = {}
    for index, function in functions.items():
        at = f"tools[{index}].{'custom' if isinstance(function, CustomFunction) else 'function'}"
        if (other := first.setdefault(function.name, index)) != index:
            raise RequestError(f"{at}.name: tools[{other}] has the name '{function.name}', too", f"{at}.name")
        kind = (function.parameters or {}).get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise RequestError(f"{at}.parameters: 'type' must be 'object', as arguments are", f"{at}.parameters")


def _named(functions: dict[int, Function], name: str, param: str) -> dict[int, Function]:
    for index, function in functions.items():
        if function.name == name:
            return {index: function}
    raise RequestError(f"'tool_choice' names '{name[:64]}', which is none of the tools", param)
