"""Chat templates mean what they mean in transformers, for which they are written."""

from dataclasses import replace

import msgspec
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.prompting import Prompting
from gateway.schema import ChatRequest

MESSAGES = [{"role": "user", "content": "<Hä & so>"}, {"role": "assistant", "content": "yes"}]
TRAINED = (  # as TRL has them: what is to be learned is marked
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 1 %}{{ m.content }}"
    "{% endgeneration %}{% else %}[{{ m.content }}]{% endif %}{{ x }}{% endfor %}"
)
COMPACT = "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}"
ESCAPED = "{{ messages[0].content | tojson(ensure_ascii=true) }}{{ messages[0].content | tojson(indent=2) }}"


@pytest.mark.parametrize("template", [TRAINED, COMPACT, ESCAPED])
def test_a_template_says_what_it_says_in_transformers(checkpoint, template):
    body = {"model": "m", "messages": MESSAGES, "add_generation_prompt": False}
    request = msgspec.convert(body, ChatRequest)
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=template)
    assert Prompting(replace(checkpoint, chat_template=template)).render(request) == expected
