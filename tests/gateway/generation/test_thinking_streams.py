"""An answer that thinks aloud, token by token: a stream adds up to the whole, wherever it is cut, ended or lost."""

import asyncio
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import open_checkpoint
from contracts.events import Event, Finished, FinishReason, Prefilled, Token, Tokens
from contracts.ids import Epoch, RequestId
from gateway.api.openai.chat import ChatFormatter, ParsedChatFormatter
from gateway.api.openai.responses import ResponsesFormatter
from gateway.api.openai.responses_input import to_chat
from gateway.api.openai.schema import ResponsesRequest, parse
from gateway.generation.generation_state import GenerationState, OutputDelta
from gateway.generation.output_parser import OutputParserSpec, parser_spec
from gateway.generation.usage import Usage
from gateway.prompting.chat_template import Prompting
from gateway.prompting.generation_request import GenerationRequest
from gateway.prompting.pipeline import prepare_chat
from gateway.prompting.request_fields import ChatRequest
from gateway.prompting.token_budget import ServingLimits
from gateway.reasoning.harmony import Harmony
from gateway.tool_calling.tool_choice import calling_of
from tests.gateway.sayings import SAY, with_specials
from tests.gateway.thinking_models import ALWAYS, CHANNELS, HYBRID, TOOLS, added_up

pytestmark = pytest.mark.slow

TAGS = ("<think>", "</think>")
FORMS: dict[str, tuple[str, Sequence[str], Sequence[str]]] = {  # template, special tokens, other added tokens
    "text tags": (HYBRID, (), ()),
    "always": (ALWAYS, (), TAGS),
    "special tags": (HYBRID, TAGS, ()),
    "harmony": (CHANNELS, Harmony.markers, ()),
}
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}
FIELDS: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "logprobs": True},
    {"include_reasoning": False, "return_token_ids": True},
    {"response_format": {"type": "json_object"}, "tools": TOOLS},
    {"stop": ["hi", "本"], "min_tokens": 3},
    {"stop": ["<", "final", "\n\n"], "include_stop_str_in_output": True, "tools": TOOLS},
    {"skip_special_tokens": False, "tools": TOOLS},
    {"messages": [*SAY, {"role": "assistant", "content": "It is"}], **GOES_ON},
    {"messages": [*SAY, {"role": "assistant", "content": "<think>It"}], **GOES_ON},
]
BITS = [*TAGS, "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|><|start|>assistant", "<|end|>"]
BITS += ["<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>", '{"city": "Paris"}', "{}"]
BITS += ["<|channel|>commentary<|message|>", " to=functions.f", " to=python", "<|channel|>", "<|message|>", "<|call|>"]
BITS += [
    '<tool_call>\n{"name": "get_weather", "arguments": ',
    "}\n</tool_call>",
    "\n",
    "\n\n",
    " ",
    "hi",
    "日本",
    "</thi",
]


@functools.cache
def prompting(form: str) -> Prompting:
    template, specials, plain = FORMS[form]
    return Prompting(with_specials(open_checkpoint(""), template, specials, plain))


@functools.cache
def asked(form: str, body: str) -> tuple[ChatRequest, GenerationRequest, OutputParserSpec]:
    request = parse(body.encode(), ChatRequest)
    ask, *_ = asyncio.run(prepare_chat(request, prompting(form), ServingLimits(4096, (0,), 8)))
    reading = parser_spec(
        prompting(form), ask.begun, calling_of(request.tools, request.tool_choice, request.parallel_tool_calls)
    )
    assert reading is not None
    return request, ask, reading


def tokens(form: str, bits: Sequence[str]) -> list[int]:
    """Each bit by itself, so that a bit in characters is none of the tokens that it is named after."""
    encoded = prompting(form).tokenizer.encode_batch(list(bits), add_special_tokens=False)
    return [token_id for part in encoded for token_id in part.ids]


def told(
    form: str, ask: GenerationRequest, ids: list[int], is_cut: bool, sizes: Sequence[int] = (), lost_at: int = -1
) -> list[OutputDelta]:
    """Return what becomes of tokens from a worker that sends `sizes` at a time, then one by one.

    At `lost_at` another worker takes over.
    """
    answer, request_id = GenerationState(ask, prompting(form), (0,)), RequestId("r")
    pieces: list[OutputDelta | None] = []

    def tell(event: Event) -> None:
        pieces.append(answer.feed(event))

    answer.sequencer.epoch = Epoch(1)
    tell(Prefilled(request_id, Epoch(1), 0, {}))
    left, at = list(sizes), 0
    while at < len(ids) and not answer.ended:
        if at >= lost_at >= 0 and answer.sequencer.epoch == 1 and at > 0:
            answer.restart(Epoch(2))
            answer.sequencer.epoch = Epoch(2)
            tell(Prefilled(request_id, Epoch(2), 0, {}))
        size = left.pop(0) if left else 1
        some = [Token(at + i, token_id, -0.5, []) for i, token_id in enumerate(ids[at : at + size])]
        tell(Tokens(request_id, answer.sequencer.epoch, some))
        at += size
    reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
    tell(Finished(request_id, answer.sequencer.epoch, len(ids), reason, {}))
    return [piece for piece in pieces if piece is not None]


def replies_of(form: str, request: ChatRequest, reading: OutputParserSpec) -> ParsedChatFormatter:
    own = prompting(form)
    chat = ChatFormatter("i", "m", 0, own, bool(request.logprobs), own.token_text)
    return ParsedChatFormatter(chat, reading, request.include_reasoning is not False)


def called(chunks: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    calls: dict[int, dict[str, str]] = {}
    for entry in (entry for chunk in chunks for entry in chunk["delta"].get("tool_calls", ())):
        call = calls.setdefault(entry["index"], {"name": entry["function"].get("name", ""), "arguments": ""})
        call["arguments"] += entry["function"]["arguments"]
    return list(calls.values())


answers = st.lists(st.sampled_from(BITS) | st.sampled_from(BITS).flatmap(lambda bit: st.sampled_from(list(bit))))
"""In bits that a model may write, whole or in characters."""


@given(
    form=st.sampled_from(list(FORMS)),
    fields=st.sampled_from(FIELDS),
    bits=answers.filter(bool),
    sizes=st.lists(st.integers(1, 5), max_size=20),
    cut=st.none() | st.integers(1, 60),
    lost_at=st.integers(-1, 40),
)
@settings(max_examples=600)
def test_a_stream_adds_up_to_the_whole(form, fields, bits, sizes, cut, lost_at):
    request, ask, reading = asked(form, json.dumps({"messages": SAY} | fields))
    ids = tokens(form, bits)[:cut]
    pieces = told(form, ask, ids, cut is not None, sizes, lost_at)
    whole, streamed = replies_of(form, request, reading), replies_of(form, request, reading)
    choice = whole.choice(told(form, ask, ids, cut is not None))
    message = choice["message"]
    chunks = [chunk for piece in pieces for body in streamed.chunk(piece) for chunk in body["choices"]]
    assert added_up(chunks, "reasoning") == added_up(chunks, "reasoning_content") == (message.get("reasoning") or "")
    calls = called(chunks)
    complete = [call["function"] for call in message.get("tool_calls", ())]
    assert [call for call in calls if call in complete] == complete
    if calls == complete:  # else one broke, and a stream can't take back what it told of it
        assert added_up(chunks, "content") == (message["content"] or "")
    assert chunks[-1]["finish_reason"] == choice["finish_reason"]
    if request.logprobs:
        assert [entry for chunk in chunks for entry in chunk["logprobs"]["content"]] == choice["logprobs"]["content"]


@given(
    form=st.sampled_from(list(FORMS)),
    bits=answers.filter(bool),
    cut=st.none() | st.integers(1, 60),
    fields=st.sampled_from([{}, {"tools": FLAT}, {"tools": FLAT, "parallel_tool_calls": False}]),
)
@settings(max_examples=600)
def test_the_events_of_a_response_come_in_order_and_add_up_to_it(form, bits, cut, fields):
    request = parse(json.dumps({"input": "a"} | fields).encode(), ResponsesRequest)
    chat = to_chat(request)
    [ask] = asyncio.run(prepare_chat(chat, prompting(form), ServingLimits(4096, (0,), 8)))
    reading = parser_spec(prompting(form), ask.begun, calling_of(chat.tools, None, chat.parallel_tool_calls))
    pieces = told(form, ask, tokens(form, bits)[:cut], cut is not None)
    streamed, whole = (ResponsesFormatter("i", "m", 0, request, ask.sampling, reading) for _ in range(2))
    usage = Usage(1, len(pieces), 0)
    events = [*streamed.opening(0, Usage(0, 0, 0)), *(event for piece in pieces for event in streamed.chunk(piece))]
    events += streamed.closing(usage, False)
    whole.choice(pieces)
    output = events[-1]["response"]["output"]
    if not any(item["type"] == "function_call" and item["status"] == "incomplete" for item in output):
        assert unnamed(events[-1]["response"]) == unnamed(whole.whole([], usage))
    items: list[dict[str, Any]] = []
    state, text = "", ""
    for event in events[2:-1]:
        kind = re.sub(r"^response\.((output|reasoning)_text\.|function_call_arguments\.)?", "", event["type"])
        assert (state, kind) in ORDER
        assert event["output_index"] == len(items) and event.get("content_index", 0) == 0
        text = "" if kind == "output_item.added" else text + event.get("delta", "")
        if kind == "done":
            assert event.get("text", event.get("arguments")) == text
        if kind == "output_item.done":
            item = event["item"]
            assert (item["arguments"] if "arguments" in item else item["content"][0]["text"]) == text
            items.append(event["item"])
        state = kind
    assert items == output and state == "output_item.done"


def unnamed(response: dict[str, Any]) -> dict[str, Any]:
    """Without the names of calls, which are drawn."""
    return response | {"output": [item | {"call_id": ""} for item in response["output"]]}


ORDER = {
    ("output_item.added", "delta"),
    ("output_item.added", "done"),
    ("done", "output_item.done"),
    ("", "output_item.added"),
    ("output_item.added", "content_part.added"),
    ("content_part.added", "delta"),
    ("content_part.added", "done"),
    ("delta", "delta"),
    ("delta", "done"),
    ("done", "content_part.done"),
    ("content_part.done", "output_item.done"),
    ("output_item.done", "output_item.added"),
}


words = st.text(st.sampled_from("ab é日\n<>|/"), min_size=1, max_size=12).filter(str.strip)


@given(thought=words, said=words, form=st.sampled_from(list(FORMS)), goes_on=st.booleans())
@settings(max_examples=300)
def test_what_was_thought_and_said_is_told_to_the_letter(thought, said, form, goes_on):
    """But for newlines at the tags."""
    thought, said = thought.strip("\n"), said.lstrip("\n")
    final = [{"role": "assistant", "content": "<think>" if form != "harmony" else "It"}]
    body = {"messages": [*SAY, *final], **GOES_ON} if goes_on else {"messages": SAY}
    request, ask, reading = asked(form, json.dumps(body))
    if form == "harmony":
        before = [] if goes_on else ["<|channel|>analysis<|message|>", *thought, "<|end|>", "<|start|>", "assistant"]
        before += [] if goes_on else ["<|channel|>", "final", "<|message|>"]
        thought = "" if goes_on else thought
    else:
        before = [*([] if goes_on or form == "always" else ["<think>"]), *thought, "\n", "</think>", "\n\n"]
    message = replies_of(form, request, reading).choice(told(form, ask, tokens(form, [*before, *said]), False))[
        "message"
    ]
    assert (message["reasoning"] or "", message["content"]) == (thought, said)
