"""The form that an answer must have: OpenAI's `response_format`, vLLM's `structured_outputs`.

JSON has the white space between its parts that the model gives it, as with vLLM: to forbid it changes the answer.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from llguidance import LLMatcher, grammar_from
from msgspec import Meta

from contracts.errors import RequestError
from gateway.grammar.exact_schema import exact
from gateway.grammar.string_formats import without_unknown_formats

MAX_GRAMMAR_CHARS = 64 << 10
"""The longest text of Lark and GBNF.

200 KB of terminals, each made of the next, keep llguidance at work for more than half a minute. Schemas that are too
large it refuses itself.
"""

WHITE_SPACE = {"whitespace_pattern": r"[ \n\r\t]{0,32}"}
"""Between the parts of JSON, for llguidance. There is an end to it, lest a small model fill its answer with nothing."""
NO_WHITE_SPACE = {"whitespace_flexible": False}


@dataclass(frozen=True)
class FieldGrammar:
    """What one field of a request, `param`, asks for.

    Nobody has read it yet: to read some of them ends the process.
    """

    param: str
    grammar: str


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
    """Exactly one of the first five. `grammar` is Lark or GBNF.

    `disable_any_whitespace` and `whitespace_pattern` are of the first and the last of them. A client that makes an
    object of vLLM's StructuredOutputsParams sends all fields: there is no other backend to fall back to, and
    `disable_additional_properties` is refused unless it means nothing.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: Annotated[str, Meta(max_length=1024)] | None = None
    structural_tag: str | None = None


_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_UNHONOURED = ("disable_additional_properties", "structural_tag")


def grammar_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> FieldGrammar | None:
    """None if any answer will do.

    Raises RequestError, naming the field, for what llguidance knows no grammar of.
    """
    formatted = None if response_format is None else _of_format(response_format)
    if structured_outputs is None:
        return formatted
    if formatted is not None:
        raise RequestError("'response_format' and 'structured_outputs' exclude each other", "structured_outputs")
    return _of_outputs(structured_outputs)


def json_grammar(schema: dict[str, Any], param: str, space: dict[str, Any] = WHITE_SPACE) -> FieldGrammar:
    """Return the grammar of JSON by a schema, with white space as `space` says.

    Raises RequestError, naming `param`, for values that llguidance does not take in.
    """
    try:
        grammar = LLMatcher.grammar_from_json_schema(exact(schema) | {"x-guidance": space})
    except ValueError as error:  # half of a surrogate pair, or an integer of more than 64 bits
        raise RequestError(f"{param} does not compile: {error}", param) from error
    return FieldGrammar(param, grammar)


def preceded(rules: Sequence[str], name: str, grammar: str) -> str:
    """`grammar`, which compiles, behind what `rules` of Lark let come before it; they know it by `name`."""
    text = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    first = {"lark_grammar": "\n".join(["%llguidance {}", *rules])}
    return json.dumps({"grammars": [first, text[0] | {"name": name}, *text[1:]]})


def schema_of_format(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the schema of an answer that is to be JSON. Raises RequestError if it is missing."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None:
        raise RequestError("'response_format' of type json_schema needs 'json_schema'", "response_format.json_schema")
    given = wanted.json_schema
    return given.schema if given.strict else without_unknown_formats(given.schema)


def _of_format(wanted: ResponseFormat) -> FieldGrammar | None:
    if (schema := schema_of_format(wanted)) is None:
        return None
    param = "response_format" if wanted.json_schema is None else "response_format.json_schema.schema"
    return json_grammar(schema, param)


def _of_outputs(wanted: StructuredOutputs) -> FieldGrammar:
    given = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value not in (None, False)}
    for name in _UNHONOURED:
        if name in given:
            param = f"structured_outputs.{name}"
            raise RequestError(f"'{param}' is not supported; leave it out", param)
    given = {name: given[name] for name in _KINDS if name in given}
    if len(given) != 1:
        raise RequestError(f"'structured_outputs' needs exactly one of {', '.join(_KINDS)}", "structured_outputs")
    ((name, value),) = given.items()
    param = f"structured_outputs.{name}"
    if name == "json_object":
        return json_grammar({"type": "object"}, param, _space_of(wanted))
    if name == "json":
        schema = _schema(value, param) if isinstance(value, str) else value
        return json_grammar(without_unknown_formats(schema), param, _space_of(wanted))
    if wanted.whitespace_pattern is not None:
        at = "structured_outputs.whitespace_pattern"
        raise RequestError(f"'{at}' is of JSON: it needs 'json' or 'json_object'", at)
    return FieldGrammar(param, _COMPILERS[name](value, param))


def _space_of(wanted: StructuredOutputs) -> dict[str, Any]:
    """Return what may stand between the parts of JSON. Raises RequestError on a pattern that is none."""
    pattern = wanted.whitespace_pattern
    if pattern is None:
        return NO_WHITE_SPACE if wanted.disable_any_whitespace else WHITE_SPACE
    at = "structured_outputs.whitespace_pattern"
    if wanted.disable_any_whitespace:
        raise RequestError(f"'{at}' and 'disable_any_whitespace' exclude each other", at)
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise RequestError(f"{at} is no regular expression: {error}", at) from error
    return {"whitespace_pattern": pattern}


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
