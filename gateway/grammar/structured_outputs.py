"""The form that an answer must have: OpenAI's `response_format`, vLLM's `structured_outputs`.

JSON has the white space between its parts that the model gives it, as with vLLM: to forbid it changes the answer.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from llguidance import LLMatcher, grammar_from
from msgspec import Meta

from contracts.errors import RequestError
from gateway.grammar.field_grammar import NO_WHITE_SPACE, WHITE_SPACE, FieldGrammar, grammar_of_text, json_grammar
from gateway.grammar.string_formats import without_unknown_formats
from gateway.grammar.structural_tags import structural_tag_grammar


class JsonSchema(msgspec.Struct, frozen=True):
    """A schema is always obeyed to the letter; `strict` refuses formats of strings that can't be enforced."""

    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The form of an answer.

    A structural tag has a `format`, or in its older form `structures` and `triggers`.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @property
    def structural_tag(self) -> dict[str, Any] | None:
        """Return the structural tag, if it is one."""
        if self.type != "structural_tag":
            return None
        fields = {"format": self.format, "structures": self.structures, "triggers": self.triggers}
        return {"type": self.type} | {name: value for name, value in fields.items() if value is not None}


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of the first five and `structural_tag`, which is JSON. `grammar` is Lark or GBNF.

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


_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def grammar_of(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    token_ids: Mapping[str, int] = MappingProxyType({}),
) -> FieldGrammar | None:
    """Return the grammar of an answer; None if any answer will do.

    `token_ids`: of the markers that a grammar has to name as tokens. Raises RequestError, naming the field, for what
    llguidance knows no grammar of.
    """
    formatted = None if response_format is None else _of_format(response_format, token_ids)
    if structured_outputs is None:
        return formatted
    if formatted is not None:
        raise RequestError("'response_format' and 'structured_outputs' exclude each other", "structured_outputs")
    return _of_outputs(structured_outputs, token_ids)


def preceded(rules: Sequence[str], name: str, grammar: str) -> str:
    """`grammar`, which compiles, behind what `rules` of Lark let come before it; they know it by `name`."""
    text = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    first = {"lark_grammar": "\n".join(["%llguidance {}", *rules])}
    return json.dumps({"grammars": [first, text[0] | {"name": name}, *text[1:]]})


def schema_of_format(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the schema of an answer that is to be JSON. Raises RequestError if it is missing."""
    if wanted is None or wanted.type in ("text", "structural_tag"):
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None:
        raise RequestError("'response_format' of type json_schema needs 'json_schema'", "response_format.json_schema")
    given = wanted.json_schema
    return given.schema if given.strict else without_unknown_formats(given.schema)


def _of_format(wanted: ResponseFormat, token_ids: Mapping[str, int]) -> FieldGrammar | None:
    if (tag := wanted.structural_tag) is not None:
        return structural_tag_grammar(tag, "response_format", token_ids)
    if (schema := schema_of_format(wanted)) is None:
        return None
    param = "response_format" if wanted.json_schema is None else "response_format.json_schema.schema"
    return json_grammar(schema, param)


def _of_outputs(wanted: StructuredOutputs, token_ids: Mapping[str, int]) -> FieldGrammar:
    given = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value not in (None, False)}
    if "disable_additional_properties" in given:
        param = "structured_outputs.disable_additional_properties"
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
    if name == "structural_tag":
        return structural_tag_grammar(_schema(value, param), param, token_ids)
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


_COMPILERS: dict[str, Callable[[Any, str], str]] = {
    "regex": lambda text, _: LLMatcher.grammar_from_regex(text),
    "choice": lambda choices, _: grammar_from("choice", json.dumps(choices)),
    "grammar": grammar_of_text,
}


def _schema(text: str, param: str) -> dict[str, Any]:
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{param} is not valid JSON: {error}", param) from error
    if not isinstance(schema, dict):
        raise RequestError(f"{param} must be a JSON object", param)
    return schema
