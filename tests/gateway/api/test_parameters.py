"""The table of docs/api.md: each parameter is sent, and does what the table says."""

import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers.processors import TemplateProcessing

from checkpoint import Advice, Checkpoint
from gateway.api.openai.unsupported_fields import INSTEAD, REFUSED
from gateway.prompting.request_fields import ChatRequest, CompletionRequest
from tests.gateway.gateway_rig import Rig, gateway, pair

pytestmark = pytest.mark.slow

ROW = re.compile(r"^\| `(\w+)` \| (both|chat|completions) \| (honoured|ignored|refused) \| (.*) \|$", re.M)
DOCS = Path("docs/api.md").read_text(encoding="utf-8")
TABLE = {name: row for name, *row in ROW.findall(DOCS)}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
SAY = [{"role": "user", "content": "two three"}, {"role": "assistant", "content": "four"}]

PEERS_COMPLETIONS = """model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop
stream stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty
length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids
prompt_logprobs logprob_token_ids bad_words prompt_embeds add_special_tokens response_format
structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
thinking_token_budget stream_interval"""
PEERS_CHAT = """messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls reasoning_effort
include_reasoning chat_template chat_template_kwargs add_generation_prompt continue_final_message
documents mm_processor_kwargs media_io_kwargs return_prompt_text"""

EFFECTS: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 3},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "min_tokens": {"min_tokens": 2},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 1},
    "frequency_penalty": {"frequency_penalty": 1},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {"5": 1}},
    "seed": {"seed": 8},
    "n": {"n": 2},
    "stop": {"stop": ["e"]},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop": ["e"]},
    "stop_token_ids": {"stop_token_ids": [7]},
    "ignore_eos": {"ignore_eos": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "echo": {"echo": True},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "priority": {"priority": -3},
    "cache_salt": {"cache_salt": "a tenant"},
    "return_token_ids": {"return_token_ids": True},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2},
    "truncation_side": {"truncate_prompt_tokens": 2, "truncation_side": "right"},
    "add_generation_prompt": {"add_generation_prompt": False},
    "continue_final_message": {"continue_final_message": True},
    "chat_template_kwargs": {"chat_template_kwargs": {"mark": "marked"}},
    "request_id": {"request_id": "mine"},
    "add_special_tokens": {},
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"choice": ["yes", "no"]}},
    "bad_words": {"bad_words": ["no"]},
    "allowed_token_ids": {"allowed_token_ids": [5, 6]},
    "speculate": {"speculate": False},
    "tools": {"tools": TOOLS},
    "tool_choice": {"tools": TOOLS, "tool_choice": "required"},
    "parallel_tool_calls": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "reasoning_effort": {"reasoning_effort": "high"},
    "include_reasoning": {"include_reasoning": False, "chat_template_kwargs": {"thinks": True}},
}
"""What to send so that each honoured parameter must show; without the parameter itself it must not."""

VALUES: dict[str, Any] = {
    "suffix": "x",
    "best_of": 2,
    "function_call": {"name": "look"},
}


def starting(checkpoint: Checkpoint) -> Checkpoint:
    """With a token that begins every text, and a template that looks at names of its own."""

    def build():
        tokenizer = deepcopy(checkpoint.tokenizer())
        tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
        return tokenizer

    thought = "{% if thinks %}<think>{% endif %}"
    template = f"{{{{ mark }}}}{{{{ reasoning_effort }}}}{checkpoint.chat_template}{thought}"
    return replace(checkpoint, build_tokenizer=build, chat_template=template)


async def seen(rig: Rig, client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> tuple[Any, ...]:
    """Everything that a parameter could show in: the reply without its ids, and the jobs."""
    rig.workers[0].jobs.clear()
    own = {"prompt": "one two three"} if path == "/v1/completions" else {"messages": SAY}
    reply = await client.post(path, json=own | {"max_tokens": 5, "seed": 7} | fields)
    assert reply.status_code == 200, reply.text
    text = re.sub(r'"(id|created|system_fingerprint)":("[^"]*"|\d+)', "", reply.text)
    jobs = [
        (job.token_ids, msgspec.to_builtins(job.sampling), job.priority, job.cache_salt) for job in rig.workers[0].jobs
    ]
    given = reply.headers["x-request-id"]
    return text, sorted(jobs, key=repr), given if len(given) < 20 else ""


def paths(name: str) -> list[str]:
    where = TABLE[name][0]
    both = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
    return [path for key, path in both.items() if where in (key, "both")]


def of(what: str) -> list[str]:
    return [name for name, row in TABLE.items() if row[1] == what]


def test_the_table_names_all_that_peers_take_and_all_that_we_take():
    ours = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert {*PEERS_COMPLETIONS.split(), *PEERS_CHAT.split()} <= TABLE.keys()
    assert set(of("honoured")) == ours
    assert set(of("refused")) == REFUSED.keys()
    told = {name: re.findall(r"use `([\w.]+)`", row[2]) for name, row in TABLE.items() if row[1] == "refused"}
    assert {name: words[0] for name, words in told.items() if words} == INSTEAD


async def test_what_is_honoured_shows(checkpoint):
    started = gateway(starting(checkpoint), pair())
    async with started as rig, rig.client() as client:
        for name in sorted(set(of("honoured")) - {"model", "prompt", "messages"}):
            for path in paths(name):
                fields = effect(name, path)
                without = {key: value for key, value in fields.items() if key != name}
                assert await seen(rig, client, path, fields) != await seen(rig, client, path, without), (name, path)


def effect(name: str, path: str) -> dict[str, Any]:
    is_chat = "chat" in path
    if name == "logprobs":
        return {"logprobs": True if is_chat else 1}
    if name == "return_tokens_as_token_ids":
        return {"return_tokens_as_token_ids": True, "logprobs": True if is_chat else 1}
    if name == "logprob_token_ids":
        return {"logprob_token_ids": [7, 5], "logprobs": True if is_chat else 1}
    if name == "add_special_tokens":
        return {"add_special_tokens": is_chat}
    if name == "skip_special_tokens" and not is_chat:
        return {"skip_special_tokens": False, "prompt": [1, 5, 6]}
    return EFFECTS[name]


async def test_what_a_request_leaves_open_is_as_the_model_s_makers_have_it(checkpoint):
    advice = Advice(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)
    own = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    async with gateway(replace(checkpoint, advice=advice), pair()) as rig, rig.client() as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            for fields, wanted in (({}, advice), (own, Advice()), ({"top_k": 5}, replace(advice, top_k=5))):
                _, [(_, sampling, *_)], _ = await seen(rig, client, path, fields)
                drawn = {name: sampling.get(name) or 0 for name in Advice.__dataclass_fields__}
                assert Advice(**drawn) == wanted, (path, fields)
        reply = (await client.post("/v1/responses", json={"input": "two"})).json()
        assert (reply["temperature"], reply["top_p"]) == (0.6, 0.9)
        reply = (await client.post("/v1/responses", json={"input": "two", "temperature": 0.5})).json()
        assert (reply["temperature"], reply["top_p"]) == (0.5, 0.9)


async def test_what_is_ignored_changes_nothing(checkpoint):
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            plain = await seen(rig, client, path, {})
            for name in [*of("ignored"), "a_field_that_nobody_knows"]:
                for value in ("x", 3, True, {"a": "b"}, None):
                    assert await seen(rig, client, path, {name: value}) == plain, name


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_is_refused_is_named_but_for_what_means_nothing(checkpoint, path):
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        plain = await seen(rig, client, path, {})
        for name in of("refused"):
            own = {"prompt": "a"} if path == "/v1/completions" else {"messages": SAY}
            reply = await client.post(path, json=own | {name: VALUES.get(name, ["x"])})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, name)
            remedy = f"use '{INSTEAD[name]}' instead" if name in INSTEAD else "leave it out"
            assert error["message"] == f"'{name}' is not supported; {remedy}"
            for neutral in (*REFUSED[name], None):
                assert await seen(rig, client, path, {name: neutral}) == plain, name
