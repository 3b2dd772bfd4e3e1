"""What llguidance takes too lightly of a schema, held to all the same: classes of characters, and bounds of numbers."""

import itertools
import json
import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from gateway.grammar.exact_schema import LEAST, without_nul
from gateway.grammar.structured_outputs import ResponseFormat, StructuredOutputs, grammar_of, schema_of_format
from gateway.tool_calling import hermes
from gateway.tool_calling.call_grammar import calls_grammar
from gateway.tool_calling.tool_choice import Function, Tool, calling_of

BYTES = LLTokenizer("byte")
UNQUOTED = {"type": "string", "pattern": r'^[^"\\]*$'}
SHARE = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
FILE_NAME = {"type": "string", "pattern": r'^[^\\/:*?"<>|]+$'}
BOTH = {"type": "object", "properties": {"a": FILE_NAME, "b": SHARE}, "required": ["a", "b"]}
GOOD = '{"a":"x\\n","b":0.1}'
BAD = ('{"a":"\\"","b":0.1}', '{"a":"\\\\","b":0.1}', '{"a":"x","b":0}')


def lets(grammar: str, *texts: str) -> list[bool]:
    matchers = [(LLMatcher(BYTES, grammar), list(text.encode())) for text in texts]
    return [matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting() for matcher, ids in matchers]


def of_schema(schema: dict[str, Any]) -> str:
    wanted = grammar_of(None, msgspec.convert({"json": schema}, StructuredOutputs))
    assert wanted is not None
    return wanted.grammar


@pytest.mark.parametrize(
    "pattern",
    [
        UNQUOTED["pattern"],
        FILE_NAME["pattern"],
        r'[^"]',
        r'^[^]"]$',
        r'^[^-"]$',
        r'^[^[:alpha:]"]$',
        r'^(?:\[|[^"\]])+$',
        r"^\P{P}$",
        r"^[\x00-\x1f]*$",
        r"^[a-c\]]$",
        r"^\W$",
    ],
)
def test_a_string_has_no_character_that_its_pattern_leaves_out(pattern):
    rule = re.compile(pattern.replace("[:alpha:]", "a-zA-Z").replace(r"\P{P}", r"[\w\s<>|^]"), re.ASCII)
    characters = [chr(code) for code in range(1, 128)]
    texts = [json.dumps(character) for character in characters]
    wanted = [rule.search(character) is not None for character in characters]
    if pattern.startswith(r"^\P"):  # punctuation, as Unicode has it, but no letter, digit, sign or control
        wanted = [not (33 <= ord(c) < 127) or c.isalnum() or c in "$+<=>^`|~" for c in characters]
    assert lets(of_schema({"type": "string", "pattern": pattern}), *texts) == wanted


def test_nor_has_a_name():
    schema = {"type": "object", "patternProperties": {'^[^"]$': {"type": "null"}}, "additionalProperties": False}
    assert lets(of_schema(schema), '{"a":null}', '{"\\"":null}') == [True, False]


@given(st.text('ab"\\]', max_size=4), st.text(alphabet='[]^-a"\\&x', max_size=12))
@settings(max_examples=300)
def test_a_pattern_that_is_none_is_still_none_and_others_mean_the_same(text, pattern):
    """But for U+0000."""
    sides = [LLMatcher.grammar_from_regex(side) for side in (pattern, without_nul(pattern))]
    faults = [LLMatcher.validate_grammar(side) for side in sides]
    assert bool(faults[0]) == bool(faults[1])
    if not faults[0]:
        assert lets(sides[0], text) == lets(sides[1], text)


def test_a_pattern_of_names_that_do_not_end_is_read_once():
    """Reading from each of them to the end took hours, and a client may send such a pattern."""
    pattern = r"\p{" * 400_000
    assert without_nul(pattern).replace("[", "").replace(r"&&^\x00]]", "") == pattern


BOUNDS = [-10, -1.5, -1, -0.5, 0, 0.1, 0.5, 1, 1.5, 2, 10, 10.25]
NUMBERS = ["-10", "-1.5", "-1", "-1.01", "-0.5", "-0.01", "0", "0.01", "0.1", "0.5", "1", "1.01", "1.5", "10", "10.1"]


@pytest.mark.parametrize("low", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("high", ["maximum", "exclusiveMaximum"])
def test_a_number_is_within_its_bounds(low, high):
    for least, most in itertools.combinations(BOUNDS, 2):
        schema = {"type": "number", low: least, high: most}
        above = [float(text) > least or (float(text) == least and low == "minimum") for text in NUMBERS]
        below = [float(text) < most or (float(text) == most and high == "maximum") for text in NUMBERS]
        wanted = [both == (True, True) for both in zip(above, below, strict=True)]
        assert lets(of_schema(schema), *NUMBERS) == wanted, schema


def test_of_two_lower_bounds_the_higher_holds():
    assert lets(of_schema(SHARE | {"minimum": 0.2}), "0", "0.1", "0.2", "0.5") == [False, False, True, True]


def test_next_to_a_bound_all_but_the_least_numbers_are_let_through():
    assert lets(of_schema(SHARE), f"{2 * LEAST:.40f}") == [True]
    above_1 = of_schema({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5})
    assert lets(above_1, f"{math.nextafter(1, 2):.16f}1") == [True]


def test_values_and_names_that_look_like_rules_stay():
    values = {"properties": {"pattern": {"const": {"pattern": '[^"]'}}}, "required": ["pattern"]}
    assert lets(of_schema({"type": "object"} | values), '{"pattern":{"pattern":"[^\\"]"}}') == [True]


def test_it_holds_wherever_a_schema_does():
    tools = [Tool(Function("go", parameters=BOTH, strict=True))]
    strict = {"type": "json_schema", "json_schema": {"schema": BOTH, "strict": True}}
    wanted = msgspec.convert(strict, ResponseFormat)
    formatted = grammar_of(wanted, None)
    assert formatted is not None and lets(formatted.grammar, GOOD, *BAD) == [True, False, False, False]
    auto = calling_of(tools, None, None)
    assert auto is not None
    answer = calls_grammar(auto, hermes.FORM, {}, schema_of_format(wanted))
    assert lets(answer, GOOD, *BAD) == [True, False, False, False]
    calls = [hermes.FORM.spell([("go", text.replace(",", ", ").replace(":", ": "))]) for text in (GOOD, *BAD)]
    assert lets(answer, *calls) == [True, False, False, False]
