"""What an answer must look like: OpenAI's `response_format` and vLLM's `structured_outputs`, as llguidance's grammar.

JSON comes without white space between its parts, so that a small model can't fill its answer with it.
"""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from llguidance import LLMatcher, grammar_from
from msgspec import Meta

from contracts.errors import RequestError
from gateway.exact_schema import exact
from gateway.string_formats import without_unknown_formats

MAX_GRAMMAR_CHARS = 64 << 10
"""Of Lark and GBNF: 200 KB of terminals, each made of the next, keep llguidance at work for more than half a minute.
Schemas that are too large it refuses itself.
"""

Fault = Callable[[str], str]
"""Why a grammar is none, as llguidance says it; empty if it is one. To read some of them ends the process."""


class JsonSchema(msgspec.Struct, frozen=True):
    """A schema is always obeyed to the letter; `strict` refuses formats of strings that can't be enforced."""

    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of them. `grammar` is Lark or GBNF."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def grammar_of(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    fault: Fault = LLMatcher.validate_grammar,
) -> str:
    """Empty if any answer will do. Raises RequestError, naming the field, for what does not compile."""
    formatted = "" if response_format is None else _of_format(response_format, fault)
    if structured_outputs is None:
        return formatted
    if formatted:
        raise RequestError("'response_format' and 'structured_outputs' exclude each other", "structured_outputs")
    return _of_outputs(structured_outputs, fault)


def require_schema(schema: dict[str, Any], param: str, fault: Fault) -> None:
    """Raises RequestError, naming `param`, if it does not compile."""
    _json_grammar(schema, param, fault)


def compiled_lark(lark: str, param: str, fault: Fault) -> str:
    """Raises RequestError, naming `param`, if it does not compile."""
    return _checked(LLMatcher.grammar_from_lark(lark), param, fault)


def preceded(rules: Sequence[str], name: str, grammar: str) -> str:
    """`grammar`, which compiles, behind what `rules` of Lark let come before it; they know it by `name`."""
    text = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    first = {"lark_grammar": "\n".join(["%llguidance {}", *rules])}
    return json.dumps({"grammars": [first, text[0] | {"name": name}, *text[1:]]})


def schema_of_format(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """Of an answer that is to be JSON. Raises RequestError if it is missing."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None:
        raise RequestError("'response_format' of type json_schema needs 'json_schema'", "response_format.json_schema")
    given = wanted.json_schema
    return given.schema if given.strict else without_unknown_formats(given.schema)


def _of_format(wanted: ResponseFormat, fault: Fault) -> str:
    if (schema := schema_of_format(wanted)) is None:
        return ""
    param = "response_format" if wanted.json_schema is None else "response_format.json_schema.schema"
    return _json_grammar(schema, param, fault)


def _of_outputs(wanted: StructuredOutputs, fault: Fault) -> str:
    given = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value not in (None, False)}
    if len(given) != 1:
        names = ", ".join(wanted.__struct_fields__)
        raise RequestError(f"'structured_outputs' needs exactly one of {names}", "structured_outputs")
    ((name, value),) = given.items()
    param = f"structured_outputs.{name}"
    if name == "json_object":
        return _json_grammar({"type": "object"}, param, fault)
    if name == "json":
        schema = _schema(value, param) if isinstance(value, str) else value
        return _json_grammar(without_unknown_formats(schema), param, fault)
    return _checked(_COMPILERS[name](value, param), param, fault)


def _of_grammar(text: str, param: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"{param} is longer than {MAX_GRAMMAR_CHARS} characters", param)
    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        raise RequestError(f"{param}: {error}", param) from error


_COMPILERS: dict[str, Callable[[Any, str], str]] = {
    "regex": lambda text, _: LLMatcher.grammar_from_regex(text),
    "choice": lambda choices, _: grammar_from("choice", json.dumps(choices)),
    "grammar": _of_grammar,
}


def _schema(text: str, param: str) -> dict[str, Any]:
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{param} is not valid JSON: {error}", param) from error
    if not isinstance(schema, dict):
        raise RequestError(f"{param} must be a JSON object", param)
    return schema


def _json_grammar(schema: dict[str, Any], param: str, fault: Fault) -> str:
    try:
        grammar = LLMatcher.grammar_from_json_schema(exact(schema), overrides={"whitespace_flexible": False})
    except ValueError as error:  # half of a surrogate pair, or an integer of more than 64 bits
        raise RequestError(f"{param} does not compile: {error}", param) from error
    return _checked(grammar, param, fault)


def _checked(grammar: str, param: str, fault: Fault) -> str:
    if error := fault(grammar):
        raise RequestError(f"{param} does not compile: {_in_a_line(error)}", param)
    return grammar


def _in_a_line(error: str) -> str:
    """The first line and the one that names the cause; between them the library draws where it is."""
    first, *others = (line.strip() for line in error.strip().splitlines())
    causes = [line for line in others if line.startswith("error:")]
    return " ".join([first, *causes])[:500]
