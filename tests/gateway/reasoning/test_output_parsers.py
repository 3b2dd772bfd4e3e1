"""What is thought, said and called in an answer, whole and in pieces."""

import json
import re
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.reasoning.harmony import MAX_HEADER_CHARS, Harmony, HarmonyParser
from gateway.reasoning.reasoning_format import ReasoningFormat, ReasoningParser
from gateway.reasoning.registry import thinking_of
from gateway.reasoning.tags import MAX_SPACE_CHARS, Tags
from gateway.tool_calling import hermes
from gateway.tool_calling.call_parser import CallParser
from gateway.tool_calling.events import (
    ContentDelta,
    MalformedToolCall,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)

pytestmark = pytest.mark.slow

THINK, MISTRAL, HARMONY = Tags("<think>", "</think>"), Tags("[THINK]", "[/THINK]"), Harmony()
SEED = Tags("<seed:think>", "</seed:think>", inner="<seed:cot_budget_reflect>")
PARIS = '{"city": "Paris"}'
TAGGED = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
CALLS = [("get_weather", PARIS)]
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
COMMENTARY, NEXT = "<|channel|>commentary", "<|end|><|start|>assistant"
CALL = f"{COMMENTARY} to=functions.get_weather <|constrain|>json<|message|>{PARIS}"
MARKERS = "|".join(map(re.escape, Harmony.markers))
MANY = "\n" * (MAX_SPACE_CHARS + 30)
LONG = "<|channel|>" + "x" * MAX_HEADER_CHARS

# form, what the prompt has begun, text, thought, said, calls
EXAMPLES: list[tuple[ReasoningFormat, str, str, str, str, list[tuple[str, str]]]] = [
    (THINK, "", "<think>\nHm.\n\nYes.\n</think>\n\nHello", "Hm.\n\nYes.", "Hello", []),
    (THINK, "", "<think>Hm.</think>Hello", "Hm.", "Hello", []),
    (THINK, "", "\n <think>\n\n</think>\n\nHello", "", "Hello", []),
    (THINK, "", "<think>Hm.</think>\n\n    indented\n", "Hm.", "    indented\n", []),
    (THINK, "<think>", "Hm.\n</think>\n\nHello", "Hm.", "Hello", []),
    (THINK, "<think>", "\nHm.", "Hm.", "", []),
    (THINK, "<think>", "Hm.\n</thi", "Hm.\n</thi", "", []),
    (THINK, "<think>", "\n</thi", "</thi", "", []),
    (THINK, "<think>", "\n\n", "", "", []),
    (THINK, "<think>", "a </think >b</thin\n</think>c", "a </think >b</thin", "c", []),
    (THINK, "", "<think>Hm.</think>\n\n" + TAGGED, "Hm.", "", CALLS),
    (THINK, "", f"<think>{TAGGED}</think>\n\nNo.", TAGGED, "No.", []),
    (THINK, "", "<think>Hm.</think><think>too late</think>", "Hm.", "<think>too late</think>", []),
    (THINK, "", "Say <think>x</think>", "", "Say <think>x</think>", []),
    (THINK, "", "  <thinking>x", "", "  <thinking>x", []),
    (THINK, "", "<thin", "", "<thin", []),
    (THINK, "", "x</think>y", "", "x</think>y", []),
    (THINK, "", "", "", "", []),
    (THINK, "</think>", "\n\nHello", "", "Hello", []),
    (THINK, "</think>", "\n  Hello", "", "  Hello", []),
    (THINK, "</think>", "\n<think>Hm.</think>Hello", "", "<think>Hm.</think>Hello", []),
    (MISTRAL, "[/THINK]", "[THINK]Hm.[/THINK]Hello", "", "[THINK]Hm.[/THINK]Hello", []),
    (SEED, "</seed:think>", "<seed:think>Hm.</seed:think>", "", "<seed:think>Hm.</seed:think>", []),
    (THINK, "H", "\n\n<think>Hm.</think>", "", "\n\n<think>Hm.</think>", []),
    (THINK, "</think>", "\n" + TAGGED, "", "", CALLS),
    (THINK, "<think>", "Hm." + MANY + "</think>Hello", "Hm." + MANY[MAX_SPACE_CHARS:], "Hello", []),
    (THINK, "", MANY + "<think>Hm.</think>", "", MANY + "<think>Hm.</think>", []),
    (MISTRAL, "", "[THINK]Hm.[/THINK]Hello", "Hm.", "Hello", []),
    (HARMONY, "", f"{ANALYSIS}Hm.{NEXT}{FINAL}Hello", "Hm.", "Hello", []),
    (HARMONY, "", f"{ANALYSIS}Hm.{NEXT}{FINAL}Hello<|return|>", "Hm.", "Hello", []),
    (HARMONY, "", f"{FINAL}Hello\n", "", "Hello\n", []),
    (HARMONY, "", f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", "a\nb", "c", []),
    (HARMONY, "", f"{ANALYSIS}{NEXT}{ANALYSIS}b{NEXT}{FINAL}", "b", "", []),
    (HARMONY, "", f"{COMMENTARY}<|message|>I look.{NEXT}{FINAL}Sunny.", "", "I look.\nSunny.", []),
    (HARMONY, "", f"{ANALYSIS}Hm.{NEXT}{CALL}", "Hm.", "", CALLS),
    (HARMONY, "", f"{ANALYSIS}Hm.{NEXT}{CALL}<|call|>", "Hm.", "", CALLS),
    (HARMONY, "", f" to=functions.get_weather{COMMENTARY} json<|message|>{PARIS}<|call|>", "", "", CALLS),
    (HARMONY, "", f"{CALL}{NEXT} to=functions.f{COMMENTARY}<|message|>", "", "", [*CALLS, ("f", "{}")]),
    (HARMONY, "", f"{COMMENTARY} to=get_weather<|message|>{PARIS}", "", "", CALLS),
    (HARMONY, "", f"{ANALYSIS.replace('<|m', ' to=functions.get_weather<|m')}{PARIS}", "", "", CALLS),
    (HARMONY, "", f"{COMMENTARY} to=python code<|message|>print(1)<|call|>{FINAL}1", "print(1)", "1", []),
    (HARMONY, "", f"{CALL[:-5]}", "", PARIS[:-5], []),
    (HARMONY, "", f"{COMMENTARY} to=functions.f<|message|>no JSON{NEXT}{FINAL}x", "", "no JSONx", []),
    (HARMONY, "", f"{ANALYSIS}a<|channel|>final<|message|>b<|start|>assistant{FINAL}c", "a", "b\nc", []),
    (HARMONY, "", f"{ANALYSIS}a <|x|> <|", "a <|x|> <|", "", []),
    (HARMONY, "", f"{ANALYSIS}Hm.{NEXT}<|channel|>fin", "Hm.", "", []),
    (HARMONY, "", "<|message|>Hello", "", "Hello", []),
    (HARMONY, "", "Hello <|message|> there", "", "Hello <|message|> there", []),
    (HARMONY, "", "to you", "", "to you", []),
    (HARMONY, "", "t", "", "t", []),
    (HARMONY, "", "<|x|>", "", "<|x|>", []),
    (HARMONY, "", f"{LONG}<|message|>x", "", f"{LONG}<|message|>x", []),
    (HARMONY, "<|channel|>final", "llo<|end|>", "", "llo", []),
    (HARMONY, "<|channel|>analysis", f"Hm.{NEXT}{FINAL}Hello", "Hm.", "Hello", []),
]


def fed(reader: ReasoningParser, text: str) -> list[OutputEvent]:
    """Feed the text as a gateway does: in harmony a marker is a token, and comes by itself."""
    if not isinstance(reader, HarmonyParser):
        return reader.feed(text)
    parts = re.split(f"({MARKERS})", text)
    return [event for at, part in enumerate(parts) for event in (reader.mark if at % 2 else reader.feed)(part)]


def pieces(form: ReasoningFormat, text: str, cuts: Iterable[int]) -> list[str]:
    """Cut there, but in no marker of harmony: each is a token."""
    if isinstance(form, Harmony):
        inside = {at for mark in re.finditer(MARKERS, text) for at in range(mark.start() + 1, mark.end())}
        cuts = [at for at in cuts if at not in inside]
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


def calls_parser() -> CallParser:
    return hermes.FORM.parser({"get_weather", "f"})


def read(form: ReasoningFormat, begun: str, pieces: list[str]) -> list[OutputEvent]:
    reader = form.reader(begun, calls_parser())
    return [event for piece in pieces for event in fed(reader, piece)] + reader.finish(is_cut=False)


def outcome(events: list[OutputEvent]) -> tuple[str, str, list[tuple[str, str]]]:
    """What is thought, what is said, and the complete calls."""
    names = {event.index: event.name for event in events if isinstance(event, ToolCallStarted)}
    arguments = {
        index: "".join(e.text for e in events if isinstance(e, ToolCallArguments) and e.index == index)
        for index in names
    }
    calls = [(names[event.index], arguments[event.index]) for event in events if isinstance(event, ToolCallFinished)]
    thought = "".join(event.parted for event in events if isinstance(event, ReasoningDelta))
    told = [event for event in events if isinstance(event, ContentDelta | MalformedToolCall)]
    return thought, "".join(event.parted if isinstance(event, ContentDelta) else event.text for event in told), calls


def merged(events: list[OutputEvent]) -> list[OutputEvent]:
    """Without the marks of where the text was cut."""
    whole: list[OutputEvent] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == event.index:
            whole[-1] = ToolCallArguments(event.index, last.text + event.text)
        elif isinstance(event, ContentDelta) and isinstance(last, ContentDelta) and not event.parting:
            whole[-1] = ContentDelta(last.text + event.text, last.parting)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta) and not event.parting:
            whole[-1] = ReasoningDelta(last.text + event.text, last.parting)
        else:
            whole.append(event)
    return whole


@pytest.mark.parametrize(("form", "begun", "text", "thought", "said", "calls"), EXAMPLES)
def test_an_example_is_read(form, begun, text, thought, said, calls):
    assert outcome(read(form, begun, [text])) == (thought, said, calls)


@pytest.mark.parametrize(("form", "begun", "text", "thought", "said", "calls"), EXAMPLES)
def test_it_does_not_matter_how_an_example_is_cut(form, begun, text, thought, said, calls):
    whole = merged(read(form, begun, [text]))
    for size in (1, 2, 3, 5, 7):
        assert merged(read(form, begun, pieces(form, text, range(size, len(text), size)))) == whole
    for at in range(min(len(text), 600)):
        assert merged(read(form, begun, pieces(form, text, [at]))) == whole


@st.composite
def cut_texts(draw):
    """Bits of answers, right and wrong, in any order, and where to cut them."""
    bits = ["<think>", "</think>", TAGGED, "\n", "\n\n", " ", "hi", "<", "<|", "</thi", ANALYSIS, FINAL, NEXT, CALL]
    bits += ["<|start|>assistant", "<|channel|>", "<|message|>", "<|call|>", " to=functions.f", "to=x", PARIS, "{}"]
    text = "".join(draw(st.lists(st.sampled_from(bits), max_size=14)))
    return text, sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))


@given(
    cut=cut_texts(),
    how=st.sampled_from([(THINK, ""), (THINK, "<think>"), (HARMONY, ""), (HARMONY, "<|channel|>final")]),
)
@settings(max_examples=2000)
def test_any_text_is_read_the_same_in_any_pieces(cut, how):
    (text, cuts), (form, begun) = cut, how
    events = read(form, begun, pieces(form, text, cuts))
    assert merged(events) == merged(read(form, begun, [text]))
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in outcome(events)[2])


@given(text=st.text(st.sampled_from("ab<>/think|[] \n"), max_size=40))
@settings(max_examples=500)
def test_what_can_be_no_marker_is_not_held_back(text):
    """But for newlines, which may be those before the end of thought."""
    reader = THINK.reader("<think>", None)
    told = "".join(event.text for event in reader.feed("a" + text) if isinstance(event, ReasoningDelta))
    if "</think>" not in text:
        assert "</think>".startswith(("a" + text).removeprefix(told).lstrip("\n"))


@given(text=st.lists(st.sampled_from([*Harmony.markers, "assistant", "analysis", "<|", "hi"])).map("".join))
@settings(max_examples=500)
def test_text_is_no_marker_of_harmony_though_it_reads_like_one(text):
    reader = HARMONY.reader("", None)
    told = "".join(event.text for event in fed(reader, FINAL) + reader.feed(text) if isinstance(event, ContentDelta))
    assert told == text, "nothing is held back: only a token ends a message"


@pytest.mark.parametrize("begun", ["", "<think>"])
def test_a_model_that_goes_on_with_white_space_is_not_held_back_for_ever(begun):
    """Otherwise each token would cost as much as all before it."""
    reader = THINK.reader(begun, None)
    events = [event for text in ["a" if begun else " ", *"\n" * 1000] for event in reader.feed(text)]
    assert (
        len("".join(event.text for event in events if isinstance(event, ContentDelta | ReasoningDelta)))
        >= 1001 - MAX_SPACE_CHARS
    )


def test_without_tools_a_call_is_thought_and_no_answer():
    reader = HARMONY.reader("", None)
    events = fed(reader, f"{CALL}{NEXT}{FINAL}Sunny.") + reader.finish(is_cut=False)
    assert outcome(events) == (PARIS, "Sunny.", [])


@pytest.mark.parametrize("text", ["<|channel|>fin", " to", "t", CALL.removesuffix(PARIS)])
def test_what_is_cut_off_before_it_begins_says_nothing(text):
    reader = HARMONY.reader("", calls_parser())
    assert outcome(fed(reader, text) + reader.finish(is_cut=True)) == ("", "", [])


def test_arguments_come_as_they_are_written():
    reader = HARMONY.reader("", calls_parser())
    events = [event for piece in pieces(HARMONY, CALL, range(len(CALL))) for event in fed(reader, piece)]
    assert events == [ToolCallStarted(0, "get_weather"), *(ToolCallArguments(0, character) for character in PARIS)]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ messages }}", None),
        ("", None),
        ("{% if '</think>' in content %}", THINK),
        ("{{ '<think>\\n' }}", THINK),
        ("[THINK]{{ x }}[/THINK]", MISTRAL),
        ("<seed:think>", SEED),
    ],
)
def test_the_form_is_told_by_the_template(template, form):
    assert thinking_of(template, ()) == form


def test_harmony_is_told_by_its_channels():
    template = "<|start|>assistant<|channel|>final<|message|><think>"
    assert isinstance(thinking_of(template, Harmony.markers), Harmony)
    assert thinking_of(template, Harmony.markers[1:]) is None, "text can't tell its markers from words about them"
    assert thinking_of("<|channel|>", Harmony.markers) is None


@pytest.mark.parametrize(
    ("form", "prompt", "final", "begun"),
    [
        (THINK, "<|user|>hi<|assistant|>\n<think>\n", "", "<think>"),
        (THINK, "<|user|>hi<|assistant|>\n<think>\n\n</think>\n\n", "", "</think>"),
        (SEED, "<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>", "", "<seed:think>"),
        (SEED, "<seed:bos>user\n<seed:think><seed:eos><seed:bos>assistant\n", "", ""),
        (THINK, "<|user|>what is <think>?<|assistant|>", "", ""),
        (THINK, "<|user|>hi<|assistant|><think>so", "<think>so", "<think>"),
        (THINK, "<|user|>hi<|assistant|><think>so</think>He", "<think>so</think>He", "H"),
        (THINK, "<|user|>hi<|assistant|><think>so</think>\n", "<think>so</think>\n", "</think>"),
        (THINK, "<|user|>hi<|assistant|><think>\nso", "so", "<think>"),
        (THINK, "<|user|>hi<|assistant|><think>\n</think>\nso", "so", "s"),
        (THINK, "<|user|>hi<|assistant|>\n<think>\n\n</think>\n\n\n", "\n", "</think>"),
        (HARMONY, "<|start|>user<|message|>hi<|end|><|start|>assistant", "", ""),
        (HARMONY, f"<|end|><|start|>assistant{FINAL}He", "He", "assistant<|channel|>final"),
        (HARMONY, f"<|end|><|start|>assistant{FINAL}He<|end|>", "", ""),
        (HARMONY, "", "", ""),
    ],
)
def test_the_prompt_may_have_begun_the_answer(form, prompt, final, begun):
    assert form.begun(prompt, final) == begun
