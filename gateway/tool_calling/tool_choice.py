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
    """A tool as the Responses API has it."""

    type: Literal["function"]

    def nested(self) -> Tool:
        return Tool("function", Function(self.name, self.description, self.parameters, self.strict))


class FunctionChoice(msgspec.Struct, frozen=True):
    name: str


class FlatChoice(msgspec.Struct, frozen=True):
    """A function that is to be called, as the Responses API names it."""

    type: Literal["function"]
    name: str


class NamedChoice(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionChoice


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
FlatTools = Annotated[list[FlatTool], Meta(max_length=1024)]
FlatToolChoice = Literal["none", "auto", "required"] | FlatChoice
MadeCalls = Annotated[list[MadeCall], Meta(max_length=1024)]


@dataclass(frozen=True)
class Calling:
    """How an answer may call: `functions` by their place in `tools`, whether it has to, whether more than once."""

    functions: dict[int, Function]
    must: bool = False
    in_parallel: bool = True


def calling_of(tools: Sequence[Tool] | None, choice: ToolChoice | None, in_parallel: bool | None) -> Calling | None:
    """None: the answer is not to call. Raises RequestError, naming the field."""
    functions = {index: tool.function for index, tool in enumerate(tools or ())}
    _require_sound(functions)
    if not functions and not (choice is None or choice in ("none", "auto")):
        raise RequestError("'tool_choice' needs 'tools'", "tool_choice")
    if not functions or choice == "none":
        return None
    if isinstance(choice, NamedChoice):
        return Calling(_named(functions, choice.function.name), must=True, in_parallel=False)
    return Calling(functions, must=choice == "required", in_parallel=in_parallel is not False)


def schema_of(function: Function) -> dict[str, Any]:
    """Of its arguments."""
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return function.parameters | {"type": "object"}


def described(tool: Tool, needs_all_fields: bool = False) -> dict[str, Any]:
    """As chat templates know tools: nothing of what concerns the server alone."""
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
