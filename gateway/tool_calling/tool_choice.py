"""What a client says of tools: the fields of a chat request, and what they come to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from contracts.errors import RequestError

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


class Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: Function


class FlatTool(Function, frozen=True, kw_only=True, omit_defaults=False):
    """A function as the Responses API has it."""

    type: Literal["function"]

    def nested(self) -> Tool:
        return Tool("function", Function(self.name, self.description, self.parameters, self.strict))


class FunctionChoice(msgspec.Struct, frozen=True):
    name: str


class CustomTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the Responses API that takes free text.

    `format`: what the text must look like, told in words.
    """

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: dict[str, Any] | None = None

    def nested(self) -> Tool:
        """Return it as a function of one text: so chat templates and grammars know tools."""
        words = [self.description or "", _rules(self.format or {})]
        return Tool("function", Function(self.name, "\n".join(filter(None, words)) or None, CUSTOM_PARAMETERS))


def _rules(form: dict[str, Any]) -> str:
    is_grammar = form.get("type") == "grammar"
    return f"The input follows this grammar ({form.get('syntax')}):\n{form.get('definition')}" if is_grammar else ""


CUSTOM_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


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
    """A function that is to be called, or those that may be."""

    type: Literal["function", "allowed_tools"]
    function: FunctionChoice | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class MadeFunction(msgspec.Struct, frozen=True):
    """`arguments`: JSON in a string; vLLM takes an object as well."""

    name: str
    arguments: str | dict[str, Any] = ""


class MadeCall(msgspec.Struct, frozen=True):
    """A call that an assistant's message tells of."""

    function: MadeFunction
    id: str | None = None
    type: Literal["function"] = "function"


Tools = Annotated[list[Tool], Meta(max_length=1024)]
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
    tools: Sequence[Tool] | None, choice: ToolChoice | None
) -> tuple[Sequence[Tool] | None, ToolChoice | None]:
    """Return the tools that `choice` allows, and the choice among them.

    Raises RequestError, naming the field.

    The model sees the allowed ones only: it does not hear of what it is not to call.
    """
    if not isinstance(choice, NamedChoice):
        return tools, choice
    part = choice.function if choice.type == "function" else choice.allowed_tools
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
    function = entry.get("function", entry)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"{param} names no function", param)
    return name


def calling_of(tools: Sequence[Tool] | None, choice: ToolChoice | None, in_parallel: bool | None) -> Calling | None:
    """None: the answer is not to call. Raises RequestError, naming the field."""
    functions = {index: tool.function for index, tool in enumerate(tools or ())}
    _require_sound(functions)
    if not functions and not (choice is None or choice in ("none", "auto")):
        raise RequestError("'tool_choice' needs 'tools'", "tool_choice")
    if not functions or choice == "none":
        return None
    if isinstance(choice, NamedChoice) and choice.function is not None:
        return Calling(_named(functions, choice.function.name), must=True, in_parallel=False)
    return Calling(functions, must=choice == "required", in_parallel=in_parallel is not False)


def schema_of(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments."""
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return function.parameters | {"type": "object"}


def described(tool: Tool, needs_all_fields: bool = False) -> dict[str, Any]:
    """Return a tool as chat templates know it, without what concerns the server alone."""
    plain = msgspec.to_builtins(msgspec.structs.replace(tool, function=_without_strict(tool.function)))
    if needs_all_fields:
        plain["function"].setdefault("description", "")
        plain["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return plain


def _without_strict(function: Function) -> Function:
    return msgspec.structs.replace(function, strict=None)


def _require_sound(functions: dict[int, Function]) -> None:
    first: dict[str, int] = {}
    for index, function in functions.items():
        at = f"tools[{index}].function"
        if (other := first.setdefault(function.name, index)) != index:
            raise RequestError(f"{at}.name: tools[{other}] has the name '{function.name}', too", f"{at}.name")
        kind = (function.parameters or {}).get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise RequestError(f"{at}.parameters: 'type' must be 'object', as arguments are", f"{at}.parameters")


def _named(functions: dict[int, Function], name: str) -> dict[int, Function]:
    for index, function in functions.items():
        if function.name == name:
            return {index: function}
    raise RequestError(f"'tool_choice' names '{name[:64]}', which is none of the tools", "tool_choice.function.name")
