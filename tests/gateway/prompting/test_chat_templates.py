"""Chat templates mean what they mean in transformers, for which they are written."""

from dataclasses import replace

import msgspec
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.api.openai.responses_input import to_chat
from gateway.api.openai.schema import ResponsesRequest
from gateway.prompting.chat_template import Prompting
from gateway.prompting.request_fields import ChatRequest

MESSAGES = [{"role": "user", "content": "<Hä & so>"}, {"role": "assistant", "content": "yes"}]
TRAINED = (  # as TRL has them: what is to be learned is marked
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 1 %}{{ m.content }}"
    "{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}{{ x }}{% endfor %}"
)
COMPACT = "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}"
ESCAPED = "{{ messages[0].content | tojson(ensure_ascii=true) }}{{ messages[1].content | tojson(indent=2) }}"


IN_PARTS = "{% for m in messages %}{% for part in m['content'] %}{{ part.text or part }}{% endfor %}{% endfor %}"
PARTS = [{"type": "text", "text": "Sum this up:"}, {"type": "text", "text": "The moon."}]


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ messages[0].content }}", "Sum this up:\nThe moon."),
        (
            "{% for m in messages %}{% if '>' in m.content %}{% endif %}{{ m.content }}{% endfor %}",
            "Sum this up:\nThe moon.",
        ),
        (IN_PARTS, "Sum this up:The moon."),
    ],
)
def test_the_parts_of_a_message_follow_each_other_as_in_vllm(checkpoint, template, shown):
    prompting = Prompting(replace(checkpoint, chat_template=template))
    body = {"messages": [{"role": "user", "content": PARTS}]}
    assert prompting.render(msgspec.convert(body, ChatRequest)) == shown
    items = [{"role": "user", "content": [part | {"type": "input_text"} for part in PARTS]}]
    assert prompting.render(to_chat(msgspec.convert({"input": items}, ResponsesRequest))) == shown


def test_what_an_assistant_refused_is_what_it_said(checkpoint):
    """A client that keeps OpenAI's answers sends it back as a part of its own kind."""
    prompting = Prompting(replace(checkpoint, chat_template="{{ messages[0].content }}"))
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can't."}]}
    assert prompting.render(msgspec.convert({"messages": [said]}, ChatRequest)) == "I can't."
    assert prompting.render(to_chat(msgspec.convert({"input": [said]}, ResponsesRequest))) == "I can't."


@pytest.mark.parametrize("template", [TRAINED, COMPACT, ESCAPED])
def test_a_template_says_what_it_says_in_transformers(checkpoint, template):
    body = {"model": "m", "messages": MESSAGES, "add_generation_prompt": False}
    request = msgspec.convert(body, ChatRequest)
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=template)
    assert Prompting(replace(checkpoint, chat_template=template)).render(request) == expected
