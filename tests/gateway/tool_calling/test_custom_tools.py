"""Tools that take text: in chat as OpenAI has them, and their grammars held within the JSON of a call."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from checkpoint import open_checkpoint
from contracts.errors import RequestError
from gateway.grammar.json_quoted_lark import json_quoted
from gateway.prompting.answer_grammar import AnswerPrefix, answer_grammar
from gateway.prompting.chat_template import Prompting
from gateway.prompting.request_fields import ChatRequest
from gateway.tool_calling import smollm2
from gateway.tool_calling.tool_choice import calling_of
from tests.gateway.sayings import saying

PATCH = """start: begin hunk+ end
begin: "*** Begin" LF
end: "*** End" LF?
hunk: add | update
add: "*** Add: " filename LF line+
update: "*** Update: " filename LF change+
filename: /(.+)/
line: "+" /(.*)/ LF -> line
change: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
SUM = 'start: expr\nexpr: term (SP ADD SP term)* -> add\n    | term\nterm: INT\nSP: " "\nADD: "+"\n%import common.INT\n'

QUOTED: list[tuple[str, list[str]]] = [
    (PATCH, ['*** Begin\n*** Add: a"b\\c.py\n+x = "1"\t\\n\n*** End', "*** Begin\n*** Update: é\n-a\n+b\n*** End\n"]),
    (PATCH, ["", "*** Begin\n*** Add: a\nx\n*** End\n", "*** Begin\n*** End"]),
    (SUM, ["1 + 2", "12", "1+2", ""]),
    ("start: /[^a]+/", ['b"\\\n\x00z', "a", "é", ""]),
    ('start: "say \\"hi\\"\\n"i X*\nX: "a".."c" | /\\s/ | /\\x41\\u{42}/', ['SAY "hi"\nab AB', 'say "hi"\n', "say hi"]),
    (
        r'start: /\w+\s?\d{2,3}[\]"\\]\/\/\./' + "\n%ignore /[ \\n]+/",
        ['ab 12"//.', "ab\t123]//.", "ab1\\//.", ' a1 12"//.\n'],
    ),
    (r'start: /[\w"]+|\p{Lu}\P{L}|[^\S ]/', ['a"b', 'Q"', "\n", " ", "Q\n", 'QQ"']),
    ('start: NL+ "x"\n%import common.NEWLINE -> NL', ["\n\nx", "\r\nx", "x"]),
    ("start: s\ns: ESCAPED_STRING\n%import common.ESCAPED_STRING", ['"a\\"b"', '"a', '"\\n"']),
    ('start: /a{1,2}b{2}"{2}/ (X | "y")\nX: Q "x"\nQ: /[\'"]/', ['aabb"""x', 'abb""\'x', 'abb""y', 'ab"']),
    ('start: x // a "comment\nx: "q" | " ".."~"', ["q", '"', "\\", "\n"]),
    ('start: /[[:upper:]"]+/ /[a-z&&[^b]\\n]+/', ['A"c', 'A"c\n', "Ab"]),
    (r"start: /.a/s /.b/i", ["\na\\B", "xa\nb", "xaxb"]),
]


@pytest.fixture(scope="module")
def byte_tokens():
    return LLTokenizer("byte")


def is_text_of(tokens: LLTokenizer, grammar: str, text: str) -> bool:
    matcher, ids = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar), log_level=0), list(text.encode())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("grammar", "texts"), QUOTED, ids=[str(at) for at in range(len(QUOTED))])
def test_a_text_fits_a_grammar_as_its_spelling_fits_the_quoted_one(byte_tokens, grammar, texts):
    quoted = json_quoted(grammar)
    for text in texts:
        spelled = json.dumps(text, ensure_ascii=False)[1:-1]
        assert is_text_of(byte_tokens, quoted, spelled) == is_text_of(byte_tokens, grammar, text), text
    assert any(is_text_of(byte_tokens, grammar, text) for text in texts) or grammar == PATCH


def custom(name: str = "patch", **form: str) -> dict[str, Any]:
    given = {"format": {"type": "grammar", "grammar": form}} if form else {}
    return {"type": "custom", "custom": {"name": name, "description": "changes files", **given}}


def in_lark(definition: str) -> dict[str, Any]:
    return custom(syntax="lark", definition=definition)


@pytest.fixture(scope="module")
def prompting():
    return Prompting(open_checkpoint(""))


@pytest.fixture(scope="module")
def ask(prompting):
    def tried(*tools: Any, choice: Any = None) -> str:
        fields = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": choice}
        request = msgspec.convert(fields, ChatRequest)
        calling = calling_of(request.tools, request.tool_choice, None)
        return asyncio.run(answer_grammar(request, prompting, calling, AnswerPrefix()))

    return tried


def called(text: str, name: str = "patch") -> str:
    return smollm2.FORM.spell([(name, json.dumps({"input": text}, ensure_ascii=False))])


@pytest.mark.parametrize("choice", [None, "required", {"type": "custom", "custom": {"name": "patch"}}])
def test_the_input_of_a_call_follows_its_grammar(accepts, ask, choice):
    other = {"type": "function", "function": {"name": "f"}}
    good, bad = '*** Begin\n*** Add: "a"\n+\tx\\n\n*** End', "*** Begin\n*** End"
    grammar = ask(in_lark(PATCH), other, choice=choice)
    assert accepts(grammar, called(good)) and not accepts(grammar, called(bad))
    assert accepts(grammar, "It is done.") == (choice is None)
    assert accepts(grammar, smollm2.FORM.spell([("f", "{}")])) == (not isinstance(choice, dict))
    regex = ask(custom(syntax="regex", definition='a"|b\\n+'), choice=choice)
    assert accepts(regex, called('a"')) and accepts(regex, called("b\n\n"))
    assert not accepts(regex, called("b")) and not accepts(regex, called('xa"'))


def test_text_without_a_grammar_is_held_to_nothing_but_the_form(accepts, ask):
    assert ask(custom()) == ""
    grammar = ask(custom(), choice="required")
    assert accepts(grammar, called('any "text"')) and not accepts(grammar, smollm2.FORM.spell([("patch", "{}")]))


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ("start: missing", "does not compile"),
        ("start: /(?=a)/", "can't be enforced"),
        ("start: A\nA: ~/a/", "can't stand in it"),
        ("start: %json {}", "can't stand in it"),
        ("start: <|im_start|>", "can't stand in it"),
        ("start: /a*?/", "lazy"),
        ("start: /(a/", "nothing closes"),
        ("start: /a)/", "nothing opens"),
    ],
)
def test_what_can_not_be_enforced_is_refused_by_name(ask, definition, words):
    with pytest.raises(RequestError, match=words) as refused:
        ask(in_lark(definition), choice="required")
    assert refused.value.param == "tools[0].custom.format.grammar.definition"


CALL = '<tool_call>[{"name": "patch", "arguments": {"input": "a \\"b\\"\\n"}}]</tool_call>'
FREE = in_lark("start: /(.|\\n)+/")


async def test_a_chat_tells_of_custom_calls_and_takes_them_back(checkpoint):
    async with saying(checkpoint, CALL) as (rig, client):
        ask: Any = {"model": rig.front.model, "tools": [FREE], "messages": [{"role": "user", "content": "go"}]}
        reply = await client.chat.completions.create(**ask)
        message = reply.choices[0].message
        assert reply.choices[0].finish_reason == "tool_calls" and message.tool_calls is not None
        call: Any = message.tool_calls[0]
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", 'a "b"\n')
        rig.workers[0].jobs.clear()
        said = [*ask["messages"], message.model_dump(exclude_none=True)]
        said.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
        await client.chat.completions.create(**ask | {"messages": said})
        shown = rig.front.prompting.tokenizer.decode(rig.workers[0].jobs[0].token_ids, skip_special_tokens=False)
        assert CALL in shown and "start: /(.|\\\\n)+/" in shown and "done" in shown


async def test_a_stream_tells_the_input_at_once(checkpoint):
    async with saying(checkpoint, CALL) as (rig, client):
        ask: Any = {"model": rig.front.model, "tools": [FREE], "messages": [{"role": "user", "content": "go"}], "n": 2}
        calls: dict[int, list[Any]] = {0: [], 1: []}
        async for chunk in await client.chat.completions.create(stream=True, **ask):
            for choice in chunk.choices:
                calls[choice.index] += choice.delta.tool_calls or ()
        for deltas in calls.values():
            first, *more = [delta.model_dump(exclude_none=True) for delta in deltas]
            assert (first["index"], first["type"], first["custom"]["name"]) == (0, "custom", "patch")
            assert first["custom"]["input"] + "".join(delta["custom"]["input"] for delta in more) == 'a "b"\n'
