"""Each text that a client sends is in the prompt, or the answer is a 400 that names its message.

Small templates, each with what one kind of real template does; tools/check_chat_templates.py tries real ones.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from contracts.errors import RequestError
from gateway.api.openai.responses_input import to_chat
from gateway.api.openai.schema import ResponsesRequest
from gateway.prompting.chat_template import Prompting
from gateway.prompting.dropped_text_check import SentText, first_lost
from gateway.prompting.pipeline import prepare_chat
from gateway.prompting.request_fields import ChatRequest
from gateway.prompting.token_budget import ServingLimits
from tests.gateway.tool_calls import TOOLS
from tools import check_chat_templates

pytestmark = pytest.mark.slow

Message = dict[str, Any]

END = "{% if add_generation_prompt %}<assistant>{% endif %}"
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" + END
"""Shows any role as a header, `developer` too, as SmolLM2's."""
NAMES_FOUR = (  # as Qwen's: what has another role is passed over
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}" + END
)
FIRST_ALONE = (  # as gpt-oss': instructions are the first message alone
    "{% if messages[0].role in ['system', 'developer'] %}<developer>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}" + END
)
AT_THE_FRONT = (  # as Qwen 3.5's
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}" + END
)
ALTERNATES = (  # as Gemma's, without a system message
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}" + END
)
CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}MANY{% for c in m.tool_calls %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% elif m.role == 'tool' %}<tool>{{ m.content | tojson }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}" + END
)
"""Shows a message's calls and not what was said beside them, as Llama's and Mistral's."""
TOOLS_AND_CALLS = "{% if tools %}{{ tools | tojson }}{{ '\"parameters\": ' }}{% endif %}" + CALLS
ONE_CALL = TOOLS_AND_CALLS.replace(
    "MANY", "{% if m.tool_calls | length > 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}"
)
STRICT_CALLS = (  # as Mistral's: words beside a call would be a turn of their own
    "{% set n = namespace(i=0) %}{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not "
    "m.tool_calls) %}{% if (m.role == 'user') != (n.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% set n.i = n.i + 1 %}{% endif %}{% endfor %}" + TOOLS_AND_CALLS
)

SYSTEM, DEVELOPER = {"role": "system", "content": "Speak Latin."}, {"role": "developer", "content": "Answer BANANA."}
USER, MORE = {"role": "user", "content": "Hi"}, {"role": "user", "content": "And now?"}
ANSWER = {"role": "assistant", "content": "Hello."}


def called(*names: str, content: str | None = None) -> Message:
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": '{"city": "Paris"}'}} for name in names
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(name: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": name, "content": content}


@contextmanager
def model(checkpoint, template: str) -> Iterator[Prompting]:
    prompting = Prompting(replace(checkpoint, chat_template=template, tool_template=None))
    try:
        yield prompting
    finally:
        prompting.close()


def rendered(checkpoint, template: str, messages: list[Message], **fields: Any) -> str:
    with model(checkpoint, template) as prompting:
        return prompting.render(msgspec.convert({"messages": messages} | fields, ChatRequest))


@pytest.mark.parametrize(
    ("template", "messages", "shown"),
    [
        (CHATML, [DEVELOPER, USER], "<system>Answer BANANA.<user>Hi<assistant>"),
        (NAMES_FOUR, [DEVELOPER, USER], "<system>Answer BANANA.<user>Hi<assistant>"),
        (NAMES_FOUR, [SYSTEM, USER, DEVELOPER], "<system>Speak Latin.\n\nAnswer BANANA.<user>Hi<assistant>"),
        (
            CHATML,
            [USER, ANSWER, SYSTEM, MORE],
            "<user>Hi<assistant>Hello.<system>Speak Latin.<user>And now?<assistant>",
        ),
        (FIRST_ALONE, [DEVELOPER, USER], "<developer>Answer BANANA.<user>Hi<assistant>"),
        (FIRST_ALONE, [SYSTEM, DEVELOPER, USER], "<developer>Speak Latin.\n\nAnswer BANANA.<user>Hi<assistant>"),
        (FIRST_ALONE, [USER, DEVELOPER], "<developer>Answer BANANA.<user>Hi<assistant>"),
        (
            AT_THE_FRONT,
            [USER, ANSWER, SYSTEM, MORE],
            "<system>Speak Latin.<user>Hi<assistant>Hello.<user>And now?<assistant>",
        ),
        (ALTERNATES, [SYSTEM, USER], "<user>Speak Latin.\n\nHi<assistant>"),
        (
            ALTERNATES,
            [DEVELOPER, USER, ANSWER, MORE],
            "<user>Answer BANANA.\n\nHi<assistant>Hello.<user>And now?<assistant>",
        ),
    ],
)
def test_instructions_reach_the_model(checkpoint, template, messages, shown):
    assert rendered(checkpoint, template, messages) == shown
    items = [message | {"type": "message"} for message in messages]
    with model(checkpoint, template) as prompting:
        assert prompting.render(to_chat(msgspec.convert({"input": items}, ResponsesRequest))) == shown


@pytest.mark.parametrize(
    ("template", "messages", "param", "words"),
    [
        ("{{ messages[-1].content }}", [USER, ANSWER, MORE], "messages[0]", "does not show it"),
        ("<{{ messages[0].content }}>", [USER, ANSWER, MORE], "messages[1]", "does not show it"),
        (CHATML.replace("m.content", "m.content[:4]"), [USER, ANSWER], "messages[1]", "does not show it"),
        (ALTERNATES, [USER, MORE], "messages", "roles must alternate"),
        (NAMES_FOUR.replace("'user', ", ""), [USER, ANSWER, USER], "messages[0]", "does not show it"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", [ANSWER | {"content": "Hi"}, USER],
         "messages[0]", "does not show it"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}<function=", [USER, called("now")],
         "messages[1].tool_calls[0]", "does not show it"),
    ],
)  # fmt: skip
def test_what_is_not_shown_is_refused_by_its_place(checkpoint, template, messages, param, words):
    with pytest.raises(RequestError, match=words) as caught:
        rendered(checkpoint, template, messages)
    assert caught.value.param == param


def test_tools_reach_a_model_whose_template_has_no_word_for_them_nor_for_a_system_message(checkpoint):
    shown = rendered(checkpoint, ALTERNATES, [USER], tools=TOOLS)
    assert shown.startswith("<user>You can call functions.") and shown.endswith("\n\nHi<assistant>")
    assert "get_weather" in shown and "<tool_call>[" in shown


@pytest.mark.parametrize("hint", ["{# tools #}", "{% set tools = 'of this trade' %}{{ tools }}", "{{ 'tools' }}"])
def test_a_word_about_tools_is_no_place_for_them(checkpoint, hint):
    """Asked of the template by showing it one: not by the word, which a comment or a text may have in it."""
    shown = rendered(checkpoint, hint + CHATML, [USER], tools=TOOLS)
    assert "get_weather" in shown and "<tool_call>[" in shown


def test_marks_in_comments_say_nothing_of_a_form(checkpoint):
    with model(checkpoint, "{# <think> [TOOL_CALLS] #}" + TOOLS_AND_CALLS) as prompting:
        assert prompting.thinking is None and prompting.tool_form is not None
        assert prompting.tool_form.parser.opening == "<|python_tag|>"


def test_a_template_of_single_calls_shows_several_one_after_the_other(checkpoint):
    turns = [USER, called("now", "then"), result("then", "at nine"), result("now", "at six"), ANSWER, MORE]
    shown = rendered(checkpoint, ONE_CALL, turns, tools=TOOLS)
    arguments = '{"city": "Paris"}'
    assert f'<call>now{arguments}<tool>"at six"<call>then{arguments}<tool>"at nine"<assistant>Hello.' in shown


def test_a_model_of_single_calls_is_held_to_one(checkpoint):
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": "required"}
    limits, request = ServingLimits(2048, (2,), 8), msgspec.convert(body, ChatRequest)

    def grammar(template: str) -> str:
        with model(checkpoint, template) as prompting:
            return asyncio.run(prepare_chat(request, prompting, limits))[0].sampling.grammar

    assert "; " in grammar(TOOLS_AND_CALLS) and "; " not in grammar(ONE_CALL)


@pytest.mark.parametrize("template", [TOOLS_AND_CALLS, ONE_CALL, STRICT_CALLS])
def test_what_was_said_beside_a_call_is_shown(checkpoint, template):
    turn = [USER, called("now", content="I look."), result("now", "at six")]
    assert "<assistant>I look." in rendered(checkpoint, template, turn, tools=TOOLS)
    later = rendered(checkpoint, template, [*turn, ANSWER, MORE], tools=TOOLS)
    assert ("<assistant>I look.\n\nHello." if template is STRICT_CALLS else "<assistant>I look.") in later


def test_an_answer_does_not_go_on_behind_calls(checkpoint):
    with pytest.raises(RequestError, match="continue_final_message") as caught:
        rendered(checkpoint, TOOLS_AND_CALLS, [USER, called("now", content="I")], continue_final_message=True)
    assert caught.value.param == "messages[1].tool_calls"


FALSE_ALARMS = [
    ("  Hi \n", "<user>Hi<assistant>"),
    ('{"sky": "blau\u00e9\\n"}', "<tool>" + json.dumps('{"sky": "blau\u00e9\\n"}')),
    ("one\n  two", "<user>one two"),
    ("Be brief. /no_think", "<system>Be brief.<user>"),
    ("?!", "<user>"),
]


@pytest.mark.parametrize(("text", "prompt"), FALSE_ALARMS)
def test_a_text_that_is_shown_in_another_form_is_not_lost(text, prompt):
    assert first_lost([SentText("messages[0]", text.strip())], prompt) is None


def test_reasoning_kept_in_a_text_is_the_templates_to_drop(checkpoint):
    drops = "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim }};{% endfor %}"
    thought = {"role": "assistant", "content": "<think>Hm.</think>\n\nHello."}
    assert rendered(checkpoint, drops, [USER, thought, MORE]) == "Hi;Hello.;And now?;"


@pytest.mark.parametrize(
    ("texts", "prompt", "lost"),
    [
        (["Hi", "Which Hi?"], "<user>Which Hi?<assistant>", 0),
        (["Hi", "Hi"], "<user>Hi<assistant>", 0),
        (["Hi", "Hi"], "<user>Hi<user>Hi", None),
        (["b", "a"], "<a><b>", None),
        (["Hello there", "Hi"], "<user>Hi<assistant>", 0),
    ],
)
def test_a_text_is_not_found_in_another(texts, prompt, lost):
    found = first_lost([SentText(str(at), text) for at, text in enumerate(texts)], prompt)
    assert (None if found is None else int(found.param)) == lost


def test_the_check_of_a_folder_of_templates_counts_what_became_of_each(tmp_path, capsys):
    for name, template in {"chatml": CHATML, "one-call": ONE_CALL, "alternates": ALTERNATES}.items():
        (tmp_path / f"{name}.jinja").write_text(template)
    assert check_chat_templates.main([str(tmp_path)]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["chatml"] == ["46", "1", "0"] and rows["all"][2] == "0"
    assert int(rows["alternates"][1]) > 1, "roles that do not alternate are refused"


@pytest.mark.parametrize(
    "turns",
    [
        [result("now", '{"temp": 20}'), {"role": "assistant", "content": 'It says {"temp": 20}.'}, MORE],
        [
            {"role": "user", "content": 'Parse {"temp": 20}'},
            result("now", '{"temp": 20}'),
            {"role": "user", "content": 'And {"temp": 20} again?'},
        ],
    ],
)
def test_a_result_that_is_quoted_in_another_form_is_shown(checkpoint, turns):
    shown = rendered(checkpoint, TOOLS_AND_CALLS, [USER, called("now"), *turns], tools=TOOLS)
    assert '"{\\"temp\\": 20}"' in shown


def test_a_thought_in_tags_that_only_the_template_knows_may_be_dropped(checkpoint):
    template = CHATML.replace("m.content", "m.content.split('</thought>')[-1]")
    answer = {"role": "assistant", "content": "Let me add.\n</thought>\n\nFour."}
    assert "<assistant>\n\nFour." in rendered(checkpoint, template, [USER, answer, MORE])
    with pytest.raises(RequestError, match="does not show it"):
        rendered(checkpoint, template.replace("[-1]", "[0]"), [USER, answer, MORE])


def test_a_switch_that_is_taken_out_counts_for_no_text(checkpoint):
    template = CHATML.replace("m.content", "m.content | replace('/no_think', '')")
    turns = [{"role": "system", "content": "/no_think"}, USER, ANSWER | {"content": "no"}, MORE]
    assert "<assistant>no" in rendered(checkpoint, template, turns)


def test_the_search_ends_however_many_texts_there_are():
    """A small body may have a million texts; each looked for in all of the prompt would stop the gateway."""
    texts = [SentText("messages[0]", f"{number:07}", is_loose=True) for number in range(20_000)]
    prompt = "\n".join(sent.text for sent in reversed(texts))
    assert first_lost(texts, prompt) is None
    assert first_lost(texts[:50], prompt[: len(prompt) // 2]) == texts[0]
