"""Structural tags: the answers that they let through, and the refusal of what is malformed.

The verdicts on texts are those of xgrammar 0.2.9, to which vLLM hands structural tags.
"""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from checkpoint import open_checkpoint
from contracts.errors import RequestError
from gateway.grammar.structural_tags import structural_tag_grammar
from gateway.prompting.answer_grammar import AnswerPrefix, answer_grammar
from gateway.prompting.chat_template import Prompting
from gateway.prompting.request_fields import ChatRequest
from gateway.tool_calling.tool_choice import calling_of

OBJECT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
SCHEMA = {"type": "json_schema", "json_schema": OBJECT}
ANY = {"type": "any_text"}
A = {"type": "tag", "begin": "<f=a>", "content": SCHEMA, "end": "</f>"}
B = {"type": "tag", "begin": "<f=b>", "content": {"type": "const_string", "value": "B"}, "end": "</f>"}
AN_A, A_B = '<f=a>{"x": 1}</f>', "<f=b>B</f>"
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [A, B]}
SEPARATED = {"type": "tags_with_separator", "tags": [A, B], "separator": ","}
OTHER = {"type": "tag", "begin": "[b]", "content": {"type": "regex", "pattern": "[0-9]+/x"}, "end": "[/b]"}
THOUGHT = {"type": "tag", "begin": "<t>", "content": ANY, "end": "</t>"}
TWO_TRIGGERS = {"type": "triggered_tags", "triggers": ["<f=a", "[b"], "tags": [A, OTHER]}

CASES: list[tuple[dict[str, Any], str, str]] = [
    (TRIGGERED, f"|hi|{AN_A}|hi {AN_A} mid {A_B} bye|hi <f|{AN_A}{AN_A}", "<f=c>|<f=a>{}</f>|no <f=a>x"),
    (TRIGGERED | {"at_least_one": True}, f"{AN_A}|{AN_A} bye|{A_B}{A_B}", f"|hi|hi {AN_A}"),
    (TRIGGERED | {"stop_after_first": True}, f"|hi|{AN_A}|hi {AN_A}", f"{AN_A} bye|{AN_A}{AN_A}"),
    (TRIGGERED | {"at_least_one": True, "stop_after_first": True}, f"{AN_A}|{A_B}", f"|hi {AN_A}|{AN_A} bye"),
    (TRIGGERED | {"excludes": ["mid"]}, f"hi {AN_A}|{AN_A} bye", f"a mid|{AN_A} mid {A_B}"),
    (TWO_TRIGGERS, f"x [b]12/x[/b] y {AN_A}|[b]1/x[/b][b]2/x[/b]|<f=c>", "[b|[b]1[/b]|<f=a>"),
    (SEPARATED, f"|{AN_A}|{AN_A},{A_B}", f"hi|{AN_A}{A_B}|{AN_A},"),
    (SEPARATED | {"at_least_one": True}, f"{AN_A}|{AN_A},{A_B}", ""),
    (SEPARATED | {"stop_after_first": True}, f"|{AN_A}", f"{AN_A},{A_B}"),
    (
        {"type": "sequence", "elements": [THOUGHT, TRIGGERED]},
        f"<t></t>|<t>a<f=c></t>{A_B}z",
        "x|<t>a|<t>a</t>b</t><f=c>",
    ),
    (THOUGHT | {"end": ["</r>", "</s>"]}, "<t>a</r>|<t>a</s>", "<t>a|<t>a</r>b"),
    (ANY | {"excludes": ["no", "ba"]}, "|yes|n o|bb aa", "a no b|ba"),
    (THOUGHT | {"content": ANY | {"max_chars": 3}}, "<t></t>|<t>abc</t>", "<t>abcd</t>"),
    (THOUGHT | {"content": {"type": "sequence", "elements": [B, TRIGGERED]}}, f"<t>{A_B}hi {AN_A}</t>", f"<t>{A_B}x"),
    (THOUGHT | {"content": {"type": "json_schema", "json_schema": True}}, "<t>[1]</t>", "<t>x</t>"),
    ({"type": "or", "elements": [SCHEMA, {"type": "const_string", "value": "none"}]}, '{"x":1}|none', "no|"),
    ({"type": "repeat", "min": 1, "max": 2, "content": B}, f"{A_B}|{A_B}{A_B}", f"|{A_B}{A_B}{A_B}"),
    ({"type": "repeat", "min": 2, "max": -1, "content": B}, f"{A_B}{A_B}{A_B}", f"{A_B}"),
    ({"type": "star", "content": B}, f"|{A_B}{A_B}", "x"),
    ({"type": "plus", "content": B}, f"{A_B}|{A_B}{A_B}", ""),
    ({"type": "optional", "content": B}, f"|{A_B}", f"{A_B}{A_B}"),
    (
        {"type": "sequence", "elements": [ANY, {"type": "const_string", "value": "END"}, B]},
        f"abEND{A_B}|END{A_B}",
        f"ab{A_B}",
    ),
    (
        {"type": "sequence", "elements": [{"type": "grammar", "grammar": 'root ::= "a" [0-9]'}, B]},
        f"a1{A_B}",
        f"a{A_B}|a1",
    ),
]


@pytest.fixture(scope="module")
def prompting():
    return Prompting(open_checkpoint(""))


@pytest.fixture(scope="module")
def ask(prompting):
    """What a chat with these fields is held to, once it was tried."""

    def tried(**fields) -> str:
        request = msgspec.convert({"messages": [{"role": "user", "content": "hi"}], **fields}, ChatRequest)
        calling = calling_of(request.tools, request.tool_choice, None)
        return asyncio.run(answer_grammar(request, prompting, calling, AnswerPrefix()))

    return tried


@pytest.mark.parametrize(("wanted", "taken", "refused"), CASES, ids=[str(at) for at in range(len(CASES))])
def test_a_structural_tag_takes_what_it_says_and_nothing_else(wanted, taken, refused, accepts, ask):
    grammar = ask(response_format={"type": "structural_tag", "format": wanted})
    assert {text: accepts(grammar, text) for text in taken.split("|")} == dict.fromkeys(taken.split("|"), True)
    assert {text: accepts(grammar, text) for text in refused.split("|")} == dict.fromkeys(refused.split("|"), False)


LEGACY = {"structures": [{"begin": "<f=a>", "schema": OBJECT, "end": "</f>"}], "triggers": ["<f="]}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag"} | LEGACY},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag"} | LEGACY)}},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", "format": TRIGGERED})}},
    ],
)
def test_both_fields_take_both_forms(fields, accepts, ask):
    grammar = ask(**fields)
    assert accepts(grammar, f"hi {AN_A} bye") and not accepts(grammar, "hi <f=a>{}</f>")


def test_it_holds_for_the_whole_answer_where_there_are_tools(accepts, ask):
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    grammar = ask(response_format={"type": "structural_tag", "format": A}, tools=tools)
    assert accepts(grammar, AN_A) and not accepts(grammar, '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>')


def test_markers_that_are_tokens_begin_and_end_tags(accepts, prompting):
    tag = {"type": "tag", "begin": "<jupyter_start>f", "content": SCHEMA, "end": "<jupyter_output>"}
    for wanted in (tag, {"type": "triggered_tags", "triggers": ["<jupyter_start>"], "tags": [tag]}):
        given = {"type": "structural_tag", "format": wanted}
        grammar = structural_tag_grammar(given, "response_format", prompting.marker_ids).grammar
        assert accepts(grammar, '<jupyter_start>f{"x": 1}<jupyter_output>')
        assert not accepts(grammar, '<jupyter_start>f{"x": 1}') and not accepts(grammar, "<jupyter_start>g")


def deep(levels: int) -> dict[str, Any]:
    wanted: dict[str, Any] = B
    for _ in range(levels):
        wanted = {"type": "optional", "content": wanted}
    return wanted


@pytest.mark.parametrize(
    ("wanted", "param", "words"),
    [
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "format.type", "triggered_tags"),
        ({"type": "regex", "pattern": 3}, "format.pattern", "Expected `str`"),
        ({"type": "regex", "pattern": "(a"}, "format.pattern", "does not compile"),
        ({"type": "grammar", "grammar": "start: missing"}, "format.grammar", "does not compile"),
        (A | {"content": SCHEMA | {"json_schema": {"not": {}}}}, "format.content.json_schema", "does not compile"),
        (SCHEMA | {"style": "qwen_xml"}, "format.style", "allowed: 'json'"),
        (SCHEMA | {"json_schema": False}, "format.json_schema", "nothing fits"),
        (A | {"more": 1}, "format", "unknown field `more`"),
        (A | {"end": []}, "format.end", "length >= 1"),
        (TRIGGERED | {"triggers": ["<g="]}, "format.tags[0].begin", "0 of the triggers"),
        (TRIGGERED | {"triggers": ["<f", "<f="]}, "format.tags[0].begin", "2 of the triggers"),
        (TRIGGERED | {"triggers": [""]}, "format.triggers[0]", "length >= 1"),
        ({"type": "star", "content": ANY}, "format.content", "needs an end"),
        ({"type": "sequence", "elements": [ANY, B]}, "format.elements[0]", "needs an end"),
        ({"type": "repeat", "min": 3, "max": 2, "content": B}, "format.max", "less than 'min'"),
        (deep(40), "format", "in each other"),
        (deep(2000), "", "nested too deeply"),
    ],
)
def test_what_is_malformed_is_refused_by_its_place(wanted, param, words, ask):
    with pytest.raises(RequestError, match=words) as refused:
        ask(response_format={"type": "structural_tag", "format": wanted})
    assert (refused.value.param or "").startswith(f"response_format.{param}".rstrip("."))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
        ({"response_format": {"type": "structural_tag", "triggers": ["a"]}}, "response_format.structures"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag.format"),
        ({"structured_outputs": {"structural_tag": "{}", "regex": "a"}}, "structured_outputs"),
    ],
)
def test_what_is_missing_is_named(fields, param, ask):
    with pytest.raises(RequestError) as refused:
        ask(**fields)
    assert refused.value.param == param
