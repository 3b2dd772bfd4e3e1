"""What an answer that has to call may look like, and the clear refusal of what can't be called."""

import asyncio
import functools
import json
from dataclasses import replace

import msgspec
import pytest
from jsonschema import validate
from llguidance import LLMatcher, LLTokenizer

from checkpoint import open_checkpoint
from contracts.errors import RequestError
from gateway.prompting.answer_grammar import AnswerPrefix, answer_grammar
from gateway.prompting.chat_template import Prompting
from gateway.prompting.request_fields import CompletionRequest
from gateway.tool_calling import hermes, llama3_json, mistral, smollm2
from gateway.tool_calling.call_grammar import calls_grammar
from gateway.tool_calling.events import ToolCallArguments, ToolCallFinished
from gateway.tool_calling.tool_choice import Calling, Tool, ToolChoice, calling_of, schema_of

pytestmark = pytest.mark.slow

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
POINT = {"$defs": {"n": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"]}
FORMS = [hermes.FORM, smollm2.FORM, llama3_json.FORM, mistral.FORM, mistral.BY_NAME]
PARIS = '{"city": "Paris"}'


def tools(*functions: dict) -> list[Tool]:
    return msgspec.convert([{"type": "function", "function": function} for function in functions], list[Tool])


def calling(*functions: dict, choice: str | dict = "required", in_parallel: bool | None = None) -> Calling:
    wanted = calling_of(tools(*functions), msgspec.convert(choice, ToolChoice), in_parallel)
    assert wanted is not None
    return wanted


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint("")


def tokenizer_of(checkpoint, specials: tuple[str, ...]):
    tokenizer = checkpoint.tokenizer()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


@pytest.fixture(scope="module")
def accepts(checkpoint):
    """Whether a grammar takes a text to its end, and may end there; `specials` are tokens of their own."""

    @functools.cache
    def tokenizers(specials: tuple[str, ...]):
        tokenizer = tokenizer_of(checkpoint, specials)
        return tokenizer, LLTokenizer(tokenizer.to_str(), eos_token=list(checkpoint.eos_token_ids))

    def whole(grammar: str, text: str, specials: tuple[str, ...] = ()) -> bool:
        tokenizer, wrapped = tokenizers(specials)
        matcher, ids = LLMatcher(wrapped, grammar), tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return whole


@pytest.fixture(scope="module")
def ask(checkpoint):
    """What an answer whose calls are written as Hermes' is held to, once it was tried."""
    prompting = Prompting(checkpoint, "hermes")

    def tried(wanted: Calling, **fields) -> str:
        request = msgspec.convert({"prompt": "", **fields}, CompletionRequest)
        return asyncio.run(answer_grammar(request, prompting, wanted, AnswerPrefix()))

    return tried


@pytest.mark.parametrize("form", FORMS)
def test_one_call_or_more_and_nothing_else(accepts, form):
    grammar = calls_grammar(calling(WEATHER, {"name": "now"}), form, {})
    good = [[("get_weather", PARIS)], [("now", "{}")], [("now", "{}"), ("get_weather", PARIS), ("now", "{}")]]
    bad = [[("get_weather", "{}")], [("get_weather", '{"city": 5}')], [("other", "{}")], [("now", PARIS)]]
    assert [calls for calls in good if not accepts(grammar, form.spell(calls))] == []
    assert [calls for calls in bad if accepts(grammar, form.spell(calls))] == []
    assert not accepts(grammar, "It is sunny.") and not accepts(grammar, "")
    assert not accepts(grammar, form.spell(good[0]) + " Sunny.")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_one_call_alone(accepts, form, choice):
    grammar = calls_grammar(calling(WEATHER, {"name": "now"}, choice=choice, in_parallel=False), form, {})
    assert accepts(grammar, form.spell([("get_weather", PARIS)]))
    assert not accepts(grammar, form.spell([("get_weather", PARIS)] * 2))
    assert accepts(grammar, form.spell([("now", "{}")])) == (choice == "required")


@pytest.mark.parametrize("form", [hermes.FORM, mistral.FORM, mistral.BY_NAME])
def test_markers_that_are_special_tokens_are_let_through_as_such(checkpoint, accepts, form):
    tokenizer = tokenizer_of(checkpoint, form.markers)
    special_ids = {marker: tokenizer.token_to_id(marker) for marker in form.markers}
    grammar = calls_grammar(calling(WEATHER), form, special_ids)
    text = form.spell([("get_weather", PARIS)] * 2)
    assert accepts(grammar, text, form.markers)
    assert not accepts(grammar, text)


@pytest.mark.parametrize("form", [hermes.FORM, smollm2.FORM, mistral.FORM, mistral.BY_NAME])
@pytest.mark.parametrize("is_special", [False, True])
def test_strict_functions_are_obeyed_where_the_model_calls_of_itself(checkpoint, accepts, form, is_special):
    specials = form.markers if is_special else ()
    tokenizer = tokenizer_of(checkpoint, specials)
    special_ids = {marker: tokenizer.token_to_id(marker) for marker in specials}
    free = {"name": "free", "parameters": POINT}
    grammar = calls_grammar(calling(WEATHER | {"strict": True}, free, choice="auto"), form, special_ids)
    paris, odd = form.spell([("get_weather", PARIS)]), form.spell([("free", '{"y": "anything"}')])
    good = ["Hello, {world}!", paris, f"I'll look. {paris}", f"{paris}\nand {paris}", odd, "", 'a "tool" < b']
    assert [text for text in good if not accepts(grammar, text, specials)] == []
    bad = [form.spell([("get_weather", '{"city": 5}')]), "Hm. " + form.spell([("other", "{}")])]
    assert [text for text in bad if accepts(grammar, text, specials)] == []


@pytest.mark.parametrize("form", [hermes.FORM, smollm2.FORM, mistral.FORM, mistral.BY_NAME])
@pytest.mark.parametrize("is_special", [False, True])
def test_an_answer_of_a_format_may_still_be_a_call(checkpoint, accepts, form, is_special):
    specials = form.markers if is_special else ()
    tokenizer = tokenizer_of(checkpoint, specials)
    special_ids = {marker: tokenizer.token_to_id(marker) for marker in specials}
    answer = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    grammar = calls_grammar(calling(WEATHER, choice="auto"), form, special_ids, answer)
    good = ['{"ok":true}', form.spell([("get_weather", PARIS)]), form.spell([("get_weather", '{"any": 1}')] * 2)]
    assert [text for text in good if not accepts(grammar, text, specials)] == []
    bad = ["Hello!", '{"ok":3}', form.spell([("other", "{}")]), good[1] + good[0]]
    assert [text for text in bad if accepts(grammar, text, specials)] == []


def test_nothing_is_enforced_without_need_or_without_a_marker():
    assert calls_grammar(calling(WEATHER, choice="auto"), hermes.FORM, {}) == ""
    assert calls_grammar(calling(WEATHER | {"strict": True}, choice="auto"), llama3_json.FORM, {}) == ""
    assert calls_grammar(calling(WEATHER, choice="auto"), llama3_json.FORM, {}, {"type": "object"}) == ""


def test_references_within_a_schema_hold(accepts):
    grammar = calls_grammar(calling({"name": "go", "parameters": POINT}), hermes.FORM, {})
    assert accepts(grammar, hermes.FORM.spell([("go", '{"x": 3}')]))
    assert not accepts(grammar, hermes.FORM.spell([("go", '{"x": "3"}')]))


@pytest.mark.parametrize("form", FORMS)
def test_what_the_grammar_makes_is_read_as_a_valid_call(checkpoint, form):
    """A walk through the grammar that takes the last allowed token each time."""
    wanted = calling(WEATHER, choice={"type": "function", "function": {"name": "get_weather"}})
    tokenizer = checkpoint.tokenizer()
    matcher = LLMatcher(
        LLTokenizer(tokenizer.to_str(), eos_token=list(checkpoint.eos_token_ids)), calls_grammar(wanted, form, {})
    )
    ids: list[int] = []
    while not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        ids.append(mask.bit_length() - 1)
        assert matcher.consume_token(ids[-1]) and len(ids) < 300
    events = form.parser({"get_weather"}).feed(tokenizer.decode(ids))
    assert [type(event) for event in events][-1] is ToolCallFinished
    arguments = json.loads("".join(event.text for event in events if isinstance(event, ToolCallArguments)))
    validate(arguments, schema_of(wanted.functions[0]))


@pytest.mark.parametrize(
    ("given", "choice", "param"),
    [
        ([{"name": "a"}, {"name": "b"}, {"name": "a"}], "auto", "tools[2].function.name"),
        ([{"name": "a"}, {"name": "a"}], "none", "tools[1].function.name"),
        ([{"name": "a", "parameters": {"type": "string"}}], "auto", "tools[0].function.parameters"),
        ([{"name": "a", "parameters": {"type": 7}}], "auto", "tools[0].function.parameters"),
        ([{"name": "a"}], {"type": "function", "function": {"name": "b"}}, "tool_choice.function.name"),
        ([], "required", "tool_choice"),
        ([], {"type": "function", "function": {"name": "b"}}, "tool_choice"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(given, choice, param):
    with pytest.raises(RequestError) as refused:
        calling_of(tools(*given), msgspec.convert(choice, ToolChoice), None)
    assert refused.value.param == param and str(refused.value)


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"x": {"type": "no-such-type"}}},
        {"properties": {"x": {"$ref": "#/nowhere"}}},
        {"properties": {"x": {"type": "string", "pattern": "(a"}}},
        {"properties": []},
        {"properties": {"x": {"type": "integer", "minimum": 2, "maximum": 1}}, "required": ["x"]},
    ],
)
@pytest.mark.parametrize("strict", [None, True])
def test_parameters_that_do_not_compile_are_refused_by_name(ask, parameters, strict):
    function = {"name": "broken", "parameters": parameters, "strict": strict}
    with pytest.raises(RequestError) as refused:
        ask(calling({"name": "fine"}, function, choice="auto" if strict else "required"))
    assert refused.value.param == "tools[1].function.parameters"


def test_of_an_answer_or_calls_the_field_at_fault_is_named(ask):
    broken, wrong = {"name": "broken", "parameters": {"properties": []}, "strict": True}, {"type": "no-such-type"}
    formatted = {"type": "json_schema", "json_schema": {"schema": wrong}}
    with pytest.raises(RequestError) as refused:
        ask(calling(WEATHER, choice="auto"), response_format=formatted)
    assert refused.value.param == "response_format.json_schema.schema"
    with pytest.raises(RequestError) as refused:
        ask(calling(broken, choice="auto"), response_format={"type": "json_object"})
    assert refused.value.param == "tools[0].function.parameters"
    with pytest.raises(RequestError) as refused:
        ask(calling(broken, choice="auto"), structured_outputs={"json": wrong})
    assert refused.value.param == "structured_outputs.json"


BLOB = {"type": "object", "properties": {"x": {"type": "string", "format": "binary"}}, "required": ["x"]}


def test_a_format_that_no_grammar_knows_is_a_note_unless_the_function_is_strict(ask, accepts):
    function = {"name": "put", "parameters": BLOB}
    grammar = calls_grammar(calling(function), hermes.FORM, {})
    assert accepts(grammar, hermes.FORM.spell([("put", '{"x": "any"}')]))
    assert not accepts(grammar, hermes.FORM.spell([("put", '{"x": 5}')]))
    with pytest.raises(RequestError, match="Unknown format: binary"):
        ask(calling(function | {"strict": True}, choice="auto"))


def test_the_style_of_json_is_ours_to_say(accepts):
    own = WEATHER["parameters"] | {"x-guidance": {"whitespace_flexible": True}}
    grammar = calls_grammar(calling(WEATHER | {"parameters": own}), hermes.FORM, {})
    spaced = replace(hermes.FORM, before='{"name": "').spell([("get_weather", '{"city":   "Paris"}')])
    assert not accepts(grammar, spaced)


@pytest.mark.parametrize(("choice", "tool_list"), [(None, []), ("auto", []), ("none", []), ("none", [{"name": "a"}])])
def test_without_tools_or_without_leave_nothing_is_called(choice, tool_list):
    assert calling_of(tools(*tool_list), choice, None) is None
