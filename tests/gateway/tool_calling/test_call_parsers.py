"""The families' calls, read out of texts that arrive in any pieces."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tool_calling import hermes, llama3_json, mistral, smollm2
from gateway.tool_calling.events import (
    ContentDelta,
    MalformedToolCall,
    OutputEvent,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from gateway.tool_calling.registry import form_of
from gateway.tool_calling.tool_format import ToolFormat

pytestmark = pytest.mark.slow

KNOWN = {"get_weather", "now", "f"}
PARIS = '{"city": "Paris"}'
NESTED = '{"a": {"b": ["}", "{", {"c": "\\"]</tool_call>[TOOL_CALLS];"}]}, "é": "日本👍"}'
WEATHER = f'{{"name": "get_weather", "arguments": {PARIS}}}'
NOW = '{"name": "now", "arguments": {}}'
TAGGED = f"<tool_call>\n{WEATHER}\n</tool_call>"
LLAMA = f'{{"name": "get_weather", "parameters": {PARIS}}}'
TYPED = f'{{"type": "function", {LLAMA[1:]}'
CALLS = [("get_weather", PARIS)]
TWO = [*CALLS, ("now", "{}")]

EXAMPLES: list[tuple[ToolFormat, str, str, list[tuple[str, str]]]] = [
    # what the families write
    (hermes.FORM, TAGGED, "", CALLS),
    (hermes.FORM, f"{TAGGED}\n<tool_call>\n{NOW}\n</tool_call>", "", TWO),
    (hermes.FORM, f"I'll look.\n{TAGGED}", "I'll look.\n", CALLS),
    (hermes.FORM, f"\n\n{TAGGED}\n", "", CALLS),
    (hermes.FORM, f"{TAGGED}\nThat was it.", "\nThat was it.", CALLS),
    (hermes.FORM, f"<tool_call>{WEATHER}</tool_call>", "", CALLS),
    (hermes.FORM, f'<tool_call>\n{{"name": "f", "arguments": {NESTED}}}\n</tool_call>', "", [("f", NESTED)]),
    (hermes.FORM, f'<tool_call>{{"arguments": {PARIS}, "name": "get_weather"}}</tool_call>', "", CALLS),
    (hermes.FORM, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}', "", [("f", '{"a": "\\ud800"}')]),
    (hermes.FORM, '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}', "", [("f", '{"a": "\\ud800"}')]),
    (hermes.FORM, f'<tool_call>{{"name": "f", "arguments": {PARIS}, "id": 7}}</tool_call>', "", [("f", PARIS)]),
    (hermes.FORM, f'<tool_call>{{"name"  :\n"f","arguments":\n{PARIS}\n}}', "", [("f", PARIS)]),
    (hermes.FORM, f'<tool_call>{{"name": "never_heard_of", "arguments": {PARIS}}}', "", [("never_heard_of", PARIS)]),
    (smollm2.FORM, f"<tool_call>[{WEATHER}]</tool_call>", "", CALLS),
    (smollm2.FORM, f"<tool_call>[\n{WEATHER},\n{NOW}\n]</tool_call>", "", TWO),
    (smollm2.FORM, "<tool_call>[]</tool_call>", "", []),
    (llama3_json.FORM, LLAMA, "", CALLS),
    (llama3_json.FORM, f"\n{LLAMA}", "", CALLS),
    (llama3_json.FORM, f'{TYPED}; {{"type":"function","name": "now", "parameters": {{}}}}', "", TWO),
    (llama3_json.FORM, f'<|python_tag|>{LLAMA}; {{"name": "now", "parameters": {{}}}}', "", TWO),
    (llama3_json.FORM, f'{LLAMA};{{"name": "now", "parameters": {{}}}}', "", TWO),
    (llama3_json.FORM, f"Right away. <|python_tag|>{LLAMA}", "Right away. ", CALLS),
    (mistral.FORM, f"[TOOL_CALLS][{WEATHER}]", "", CALLS),
    (mistral.FORM, f"[TOOL_CALLS] [{WEATHER}, {NOW}]", "", TWO),
    (mistral.FORM, f'Sure.[TOOL_CALLS][{{"name": "f", "arguments": {NESTED}}}]', "Sure.", [("f", NESTED)]),
    (mistral.BY_NAME, f"[TOOL_CALLS]get_weather{PARIS}", "", CALLS),
    (mistral.BY_NAME, f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}", "", TWO),
    (mistral.BY_NAME, f"[TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{PARIS}", "", CALLS),
    # what is no call is said, to the letter
    (hermes.FORM, "Plain words.", "Plain words.", []),
    (hermes.FORM, "  \n ", "  \n ", []),
    (hermes.FORM, "a < b <tool <tool_call", "a < b <tool <tool_call", []),
    (hermes.FORM, "<tool_call>", "<tool_call>", []),
    (hermes.FORM, "<tool_call> not JSON </tool_call>", "<tool_call> not JSON </tool_call>", []),
    (hermes.FORM, '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
    (hermes.FORM, '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    (hermes.FORM, '<tool_call>{"name": "f", "arguments": "x"}', '<tool_call>{"name": "f", "arguments": "x"}', []),
    (
        hermes.FORM,
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        [],
    ),
    (
        hermes.FORM,
        '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}',
        '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}',
        [],
    ),
    (hermes.FORM, '<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"name": "", "arguments": {}}', []),
    (hermes.FORM, '<tool_call>{"name": "f", "arguments": {"a"', '<tool_call>{"name": "f", "arguments": {"a"', []),
    (hermes.FORM, '<tool_call>{"name": "f", "arguments": {"a": 1', '<tool_call>{"name": "f", "arguments": {"a": 1', []),
    (hermes.FORM, '<tool_call>{"name": "f", "arguments": {a: 1}}', '<tool_call>{"name": "f", "arguments": {a: 1}}', []),
    (hermes.FORM, '<tool_call>{"name": "f", "arguments": {]}}', '<tool_call>{"name": "f", "arguments": {]}}', []),
    (
        hermes.FORM,
        f'<tool_call>{{"name": "f", "arguments": {PARIS}</tool_call>{TAGGED}',
        f'<tool_call>{{"name": "f", "arguments": {PARIS}</tool_call>',
        CALLS,
    ),
    (hermes.FORM, '<tool_call>{"arguments": [' + "[" * 3000, '<tool_call>{"arguments": [' + "[" * 3000, []),
    (hermes.FORM, '<tool_call>{"name": "' + "n" * 900, '<tool_call>{"name": "' + "n" * 900, []),
    (smollm2.FORM, f"<tool_call>[{WEATHER}, 5]</tool_call>", "5]</tool_call>", CALLS),
    (smollm2.FORM, "<tool_call>[7]</tool_call>", "<tool_call>[7]</tool_call>", []),
    (llama3_json.FORM, '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
    (llama3_json.FORM, '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    (llama3_json.FORM, '{"type": "person", "name": "now"}', '{"type": "person", "name": "now"}', []),
    (llama3_json.FORM, '{"type": "function", "born": 1815}', '{"type": "function", "born": 1815}', []),
    (llama3_json.FORM, f"It is {LLAMA}", f"It is {LLAMA}", []),
    (llama3_json.FORM, '<|python_tag|>brave.call(q="a")', '<|python_tag|>brave.call(q="a")', []),
    (llama3_json.FORM, LLAMA[:-1], LLAMA[:-1], []),
    (mistral.FORM, "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    (mistral.FORM, "[TOOL_CALLS][{]", "[TOOL_CALLS][{]", []),
    (mistral.FORM, "[TOOL_CALL] [TOOL", "[TOOL_CALL] [TOOL", []),
    (mistral.BY_NAME, "[TOOL_CALLS]get_weather", "[TOOL_CALLS]get_weather", []),
    (mistral.BY_NAME, "[TOOL_CALLS]two words{}", "[TOOL_CALLS]two words{}", []),
    (mistral.BY_NAME, "[TOOL_CALLS]f[ARGS]{1}", "[TOOL_CALLS]f[ARGS]{1}", []),
    (mistral.BY_NAME, "[TOOL_CALLS]" + "n" * 400 + "{}", "[TOOL_CALLS]" + "n" * 400 + "{}", []),
]


def read(form: ToolFormat, pieces: list[str]) -> list[OutputEvent]:
    parser = form.parser(KNOWN)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def outcome(events: list[OutputEvent]) -> tuple[str, list[tuple[str, str]]]:
    """What is said, and the complete calls."""
    names = {event.index: event.name for event in events if isinstance(event, ToolCallStarted)}
    arguments = {
        index: "".join(e.text for e in events if isinstance(e, ToolCallArguments) and e.index == index)
        for index in names
    }
    calls = [(names[e.index], arguments[e.index]) for e in events if isinstance(e, ToolCallFinished)]
    return "".join(e.text for e in events if isinstance(e, ContentDelta | MalformedToolCall)), calls


def merged(events: list[OutputEvent]) -> list[OutputEvent]:
    """Without the marks of where the text was cut."""
    whole: list[OutputEvent] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            whole[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == event.index:
            whole[-1] = ToolCallArguments(event.index, last.text + event.text)
        else:
            whole.append(event)
    return whole


@pytest.mark.parametrize(("form", "text", "content", "calls"), EXAMPLES)
def test_an_example_is_read(form, text, content, calls):
    assert outcome(read(form, [text])) == (content, calls)


@pytest.mark.parametrize(("form", "text", "content", "calls"), EXAMPLES)
def test_it_does_not_matter_how_an_example_is_cut(form, text, content, calls):
    whole = merged(read(form, [text]))
    assert merged(read(form, list(text))) == whole
    for size in (2, 3, 5, 7):
        assert merged(read(form, [text[at : at + size] for at in range(0, len(text), size)])) == whole
    for at in range(min(len(text), 300)):
        assert merged(read(form, [text[:at], text[at:]])) == whole


@st.composite
def cut_texts(draw):
    """Bits of calls, right and wrong, in any order, and where to cut them."""
    bits = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", *'[],; \n"\\{}f<', "hi"]
    bits += [WEATHER, LLAMA, NOW, PARIS, '{"name": "f", ', '"arguments": ', '"parameters": {']
    text = "".join(draw(st.lists(st.sampled_from(bits), max_size=14)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(cut=cut_texts(), form=st.sampled_from([hermes.FORM, smollm2.FORM, llama3_json.FORM, mistral.FORM]))
@settings(max_examples=2000)
def test_any_text_is_read_the_same_in_any_pieces(cut, form):
    text, pieces = cut
    events = read(form, pieces)
    assert merged(events) == merged(read(form, [text]))
    content, calls = outcome(events)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    if not calls and "[" not in text:  # nothing is lost; an empty list is no call and nothing said
        assert content == text


@given(text=st.text(st.sampled_from("ab<tool_call>|[]{} \n"), max_size=40))
@settings(max_examples=500)
def test_what_can_be_no_marker_is_not_held_back(text):
    """A text that does not begin with white space is held back by at most a part of a marker."""
    parser = hermes.FORM.parser(KNOWN)
    said = "".join(event.text for event in parser.feed("a" + text) if isinstance(event, ContentDelta))
    if "<tool_call>" not in text:
        held = ("a" + text).removeprefix(said)
        assert "<tool_call>".startswith(held)


def test_arguments_come_as_they_are_written():
    parser = hermes.FORM.parser(KNOWN)
    events = [parser.feed(character) for character in TAGGED]
    first = next(index for index, now in enumerate(events) if any(isinstance(event, ToolCallStarted) for event in now))
    assert TAGGED[: first + 1].endswith('"arguments": {')
    assert [event.text for now in events for event in now if isinstance(event, ToolCallArguments)] == list(PARIS)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tool_call>{% endif %}", hermes.FORM),
        ("{% if tools %}<tool_call><function={% endif %}", None),
        ("{% if tools %}<tool_call>{{ name }}<arg_key>{% endif %}", None),
        ("{% if tools %}[TOOL_CALLS][{% endif %}", mistral.FORM),
        ("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{% endif %}", mistral.BY_NAME),
        ("{% if tools %}<|python_tag|>{% endif %}", llama3_json.FORM),
        ("""{% if tools %}{{- '"parameters": ' }}{% endif %}""", llama3_json.FORM),
        ("{% if tools %}<tool_calls_begin>{% endif %}", None),
    ],
)
def test_the_form_is_told_by_the_template(template, form):
    assert form_of(template) == form


def test_a_template_that_does_not_show_tools_has_a_form_in_words():
    assert form_of("{# tools, <tool_call> #}{{ messages }}", shows_tools=False) == smollm2.FORM


def test_what_sentencepiece_was_trained_on_has_a_space():
    assert form_of("{{ tools }}[TOOL_CALLS] [") == replace(mistral.FORM, begin="[TOOL_CALLS] [")


def test_a_name_goes_before_the_template():
    assert form_of("{% if tools %}<tool_call>{% endif %}", "llama3_json") == llama3_json.FORM


@pytest.mark.parametrize("form", [hermes.FORM, smollm2.FORM, llama3_json.FORM, mistral.FORM, mistral.BY_NAME])
def test_what_a_form_spells_its_parser_reads(form):
    calls = [("get_weather", PARIS), ("f", NESTED), ("now", "{}")]
    assert outcome(read(form, [form.spell(calls)])) == ("", calls)


@pytest.mark.parametrize(("form", "length"), [(hermes.FORM, 29), (mistral.FORM, 9)])
def test_ids_are_such_as_the_family_takes(form, length):
    ids = {form.new_id() for _ in range(100)}
    assert len(ids) == 100 and {len(given) for given in ids} == {length}
