"""The judge of structured output: its schemas are schemas, and it sees an answer that breaks one."""

import random

import pytest
from jsonschema.validators import validator_for
from llguidance import LLMatcher

from bench.serving.structured_outputs import grammar, is_valid, random_schema, validity

SCHEMAS = [random_schema(random.Random(seed)) for seed in range(100)]


def test_the_same_seed_makes_the_same_schemas_and_they_differ():
    assert [random_schema(random.Random(seed)) for seed in range(100)] == SCHEMAS
    assert len({str(schema) for schema in SCHEMAS}) > 90


@pytest.mark.parametrize("schema", SCHEMAS[:50], ids=range(50))
def test_each_is_a_schema_and_compiles(schema):
    validator_for(schema).check_schema(schema)
    assert LLMatcher.validate_grammar(grammar(schema)) == ""


def test_wrong_answers_are_seen():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    assert is_valid(schema, '{"x": 1}')
    assert not is_valid(schema, '{"x": "1"}')
    assert not is_valid(schema, '{"x": 1')


def test_answers_that_ran_out_of_tokens_do_not_count():
    (row,) = validity("engine", [{"type": "integer"}] * 3, ["1", None, '"1"'])
    assert (row.value, row.limit, row.params["schemas"]) == (1, 2, 3)
