"""What a client may ask an answer to look like, and the clear refusal of what does not compile."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from checkpoint import open_checkpoint
from contracts.errors import RequestError
from gateway.grammar.compile_sandbox import CompileSandbox
from gateway.grammar.field_grammar import MAX_GRAMMAR_CHARS
from gateway.grammar.string_formats import KNOWN
from gateway.grammar.structured_outputs import ResponseFormat, StructuredOutputs, grammar_of
from gateway.prompting.answer_grammar import AnswerPrefix, answer_grammar
from gateway.prompting.chat_template import Prompting
from gateway.prompting.request_fields import CompletionRequest

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}

OTHER_FORMATS = """base64 binary byte decimal double file-path float idn-email idn-hostname int32 iri iri-reference
json-pointer password path regex relative-json-pointer uri-reference uri-template uuid4"""


def of_format(name: str) -> dict[str, str]:
    return {"type": "string", "format": name}


NESTED = {
    "type": "object",
    "properties": {"format": of_format("path"), "const": of_format("byte"), "enum": {"$ref": "#/$defs/format"}},
    "$defs": {"format": {"anyOf": [{"type": "array", "items": of_format("binary")}, of_format("date")]}},
    "required": ["format", "const", "enum"],
    "additionalProperties": {"const": of_format("password")},
}
"""Formats of which only `date` is known; a value, and names, that look like what they are not."""


@pytest.fixture(scope="module")
def ask():
    """What a completion with these fields is held to, once it was tried."""
    prompting = Prompting(open_checkpoint(""))

    def tried(**fields) -> str:
        request = msgspec.convert({"prompt": "", **fields}, CompletionRequest)
        return asyncio.run(answer_grammar(request, prompting, None, AnswerPrefix()))

    return tried


def from_format(**fields) -> str:
    wanted = grammar_of(msgspec.convert(fields, ResponseFormat), None)
    return "" if wanted is None else wanted.grammar


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = of_format("binary")
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def from_outputs(**fields) -> str:
    wanted = grammar_of(None, msgspec.convert(fields, StructuredOutputs))
    assert wanted is not None
    return wanted.grammar


CASES = [
    (
        from_outputs(json=POINT),
        ['{"x":1}', '{"x": 1}', '{\n    "x" : 1\n}'],
        ['{"x":"1"}', "{}", '{"x":1,"y":2}', ' {"x":1}', '{"x":1}\n', '{"x":' + " " * 33 + "1}"],
    ),
    (from_outputs(json=POINT, disable_any_whitespace=True), ['{"x":1}'], ['{"x": 1}']),
    (from_outputs(json=POINT, whitespace_pattern=" ?"), ['{"x":1}', '{ "x": 1 }'], ['{"x":  1}', '{\n"x":1}']),
    (from_outputs(json_object=True, whitespace_pattern=""), ['{"x":1}'], ['{"x": 1}']),
    (from_format(type="json_object"), ['{"a": [1, 2]}', '{\n  "a": [\n    1\n  ]\n}'], ["{" + "\n" * 33 + "}"]),
    (from_outputs(json={"type": "string", "nullable": True}), ['"a"', "null"], ["1"]),
    (from_outputs(json={"type": "string", "enum": ["a"], "nullable": True}), ['"a"', "null"], ['"b"']),
    (from_outputs(json={"type": "string", "nullable": False}), ['"a"'], ["null"]),
    (
        from_outputs(
            json={
                "$defs": {"P": POINT},
                "type": "object",
                "properties": {"p": {"$ref": "#/$defs/P", "nullable": True}, "nullable": {"type": "integer"}},
                "required": ["p", "nullable"],
            }
        ),
        ['{"p":null,"nullable":1}', '{"p":{"x":1},"nullable":1}'],
        ['{"p":null,"nullable":null}', '{"p":1,"nullable":1}'],
    ),
    (from_outputs(json=json.dumps(POINT)), ['{"x":1}'], ["{}"]),
    (from_format(type="json_schema", json_schema={"name": "p", "strict": True, "schema": POINT}), ['{"x":-3}'], ["1"]),
    (from_format(type="json_object"), ["{}", '{"a":[1,null,"b"]}'], ["[]", "1"]),
    (from_outputs(json=of_format("binary")), ['"any"'], ["1"]),
    (from_outputs(json=json.dumps(of_format("binary"))), ['"any"'], ["1"]),
    (from_format(type="json_schema", json_schema={"schema": of_format("password")}), ['"any"'], ["1"]),
    (from_outputs(json=of_format("date")), ['"2024-02-29"'], ['"any"']),
    (
        from_outputs(json=NESTED),
        [
            '{"format":"a","const":"b","enum":["c"]}',
            '{"format":"a","const":"b","enum":"2024-02-29","d":{"type":"string","format":"password"}}',
        ],
        ['{"format":"a","const":"b","enum":"c"}', '{"format":"a","const":"b","enum":[],"d":{"type":"string"}}'],
    ),
    (from_outputs(json_object=True), ["{}"], ["[]"]),
    (from_outputs(regex="[a-f]{2}"), ["ab"], ["a", "abc", "xy"]),
    (from_outputs(regex="(a+)+b"), ["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"], ["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaac"]),
    (from_outputs(choice=["yes", 'say "no"']), ["yes", 'say "no"'], ["no", "yesyes"]),
    (from_outputs(grammar='start: "a" start "b" | "c"'), ["c", "aacbb"], ["aacb"]),
    (from_outputs(grammar='root ::= "x" | "y"'), ["x", "y"], ["z"]),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES)
def test_what_is_asked_for_is_what_is_let_through(accepts, grammar, good, bad):
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_plain_text_needs_no_grammar():
    assert grammar_of(None, None) is None
    assert from_format(type="text") == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"disable_any_whitespace": True}, "structured_outputs"),
        ({"json": {}, "whitespace_pattern": "("}, "structured_outputs.whitespace_pattern"),
        ({"regex": "a", "whitespace_pattern": " ?"}, "structured_outputs.whitespace_pattern"),
        (
            {"json": {}, "whitespace_pattern": " ?", "disable_any_whitespace": True},
            "structured_outputs.whitespace_pattern",
        ),
        ({"json": {}, "disable_additional_properties": True}, "structured_outputs.disable_additional_properties"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag.format"),
        ({"regex": "(a"}, "structured_outputs.regex"),
        ({"json": {"type": "no-such-type"}}, "structured_outputs.json"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": "[1]"}, "structured_outputs.json"),
        ({"json": {"$ref": "#/nowhere"}}, "structured_outputs.json"),
        ({"json": {"minimum": 2, "maximum": 1, "type": "integer"}}, "structured_outputs.json"),
        ({"json": {"items": of_format("date"), "uniqueItems": True}}, "structured_outputs.json"),
        ({"json": nested(900)}, "structured_outputs.json"),
        ({"grammar": "start: nobody"}, "structured_outputs.grammar"),
        ({"grammar": "::= ::="}, "structured_outputs.grammar"),
        ({"grammar": 'start: "a"' + " " * MAX_GRAMMAR_CHARS}, "structured_outputs.grammar"),
        ({"json": {"maximum": 10**30, "type": "integer"}}, "structured_outputs.json"),
        ({"json": '{"const": "\\ud83d"}'}, "structured_outputs.json"),
        ({"json": '{"const": NaN}'}, "structured_outputs.json"),
    ],
)
def test_what_does_not_compile_is_refused_by_name(ask, fields, param):
    with pytest.raises(RequestError) as refused:
        ask(structured_outputs=fields)
    assert refused.value.param == param
    assert param in str(refused.value)


def test_all_fields_that_vllm_has_may_be_sent(ask):
    """A client that builds an object of vLLM's StructuredOutputsParams sends all of them."""
    others = {"json": None, "choice": None, "grammar": None, "json_object": None, "whitespace_pattern": None}
    flags = {"disable_fallback": False, "disable_additional_properties": False, "structural_tag": None}
    for is_tight in (False, True):
        given = others | flags | {"regex": "[m-p]{3}", "disable_any_whitespace": is_tight}
        assert ask(structured_outputs=given) == from_outputs(regex="[m-p]{3}")


def test_what_is_wrong_with_a_pattern_is_told_in_a_line(ask):
    with pytest.raises(RequestError) as refused:
        ask(structured_outputs={"json": {"type": "string", "pattern": "("}})
    words = "structured_outputs.json does not compile: regex parse error: error: unclosed group"
    assert str(refused.value) == words


def test_no_option_is_advised_that_no_client_has(ask):
    with pytest.raises(RequestError) as refused:
        ask(structured_outputs={"json": {"oneOf": [{"type": "string"}, {"minLength": 2, "type": "string"}]}})
    assert str(refused.value).endswith(
        "does not compile: oneOf is not supported where a value may fit two of its schemas; use anyOf"
    )


def test_what_compiles_is_tried_once(ask, monkeypatch):
    asked = []
    monkeypatch.setattr(CompileSandbox, "_tried", lambda _, question: asked.append(question) or "")
    assert ask(structured_outputs={"regex": "[q-t]{3}"}) == from_outputs(regex="[q-t]{3}")
    assert len(asked) == 1


def test_the_keywords_that_the_documentation_says_are_refused_are(ask):
    section = Path("docs/api.md").read_text(encoding="utf-8").partition("## JSON schemas")[2]
    keywords = re.findall(r"`(\S+)`", section.partition("* ")[2].partition(";\n")[0])
    assert len(keywords) > 10
    for keyword in keywords:
        with pytest.raises(RequestError, match=re.escape(keyword)):
            ask(structured_outputs={"json": {keyword: {}}})


def test_what_a_grammar_knows_of_formats_is_what_we_say():
    for name in [*KNOWN, *OTHER_FORMATS.split()]:
        error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(of_format(name)))
        assert (error == "") == (name in KNOWN), name


def test_strict_refuses_a_format_that_is_not_enforced(ask):
    strict = {"type": "json_schema", "json_schema": {"strict": True, "schema": of_format("binary")}}
    with pytest.raises(RequestError, match="Unknown format: binary") as refused:
        ask(response_format=strict)
    assert refused.value.param == "response_format.json_schema.schema"


def test_a_json_schema_format_needs_its_schema():
    with pytest.raises(RequestError, match="needs 'json_schema'"):
        from_format(type="json_schema")


def test_two_ways_to_ask_exclude_each_other():
    with pytest.raises(RequestError, match="exclude each other"):
        grammar_of(ResponseFormat("json_object"), StructuredOutputs(regex="a"))
