"""What an answer's text, log-probabilities, usage and end are, against fake workers that repeat the prompt's tokens."""

import itertools
import json
from dataclasses import replace

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.gguf.tokenizer import build_tokenizer
from contracts.events import Finished, FinishReason, Token, Tokens
from contracts.ids import Epoch, RequestId
from contracts.sampling import SamplingParams
from gateway.generation.generation_state import GenerationState, OutputDelta
from gateway.prompting.chat_template import Prompting
from gateway.prompting.generation_request import GenerationRequest
from tests.gateway.gateway_rig import gateway, pair

pytestmark = pytest.mark.slow

FOX = "The quick brown fox jumps over the lazy dog."
WILD = "日本語 und 👩‍👩‍👧‍👦 naïve — ελληνικά 🇩🇪"
R = RequestId("r")


@pytest.fixture(scope="module")
def prompting(checkpoint):
    return Prompting(checkpoint)


async def whole(client: httpx.AsyncClient, **fields) -> dict:
    reply = await client.post("/v1/completions", json={"prompt": FOX, "max_tokens": 8} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def chunks(client: httpx.AsyncClient, path: str = "/v1/completions", **fields) -> list[dict]:
    body = {"max_tokens": 8, "stream": True} | ({} if "messages" in fields else {"prompt": FOX}) | fields
    reply = await client.post(path, json=body)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def joined(bodies: list[dict]) -> str:
    return "".join(choice["text"] for body in bodies for choice in body["choices"])


# Pure: an answer fed token by token


def feed(prompting: Prompting, ids: list[int], stops: tuple[str, ...] = (), include: bool = False, **sampling):
    params = SamplingParams(max_tokens=len(ids), seed=1, **sampling)
    answer = GenerationState(GenerationRequest(0, 0, [1], params, stops, include, True), prompting, (2,))
    events = [Tokens(R, Epoch(1), [Token(index, token_id, -0.5, [])]) for index, token_id in enumerate(ids)]
    pieces = [answer.feed(event) for event in [*events, Finished(R, Epoch(1), len(ids), FinishReason.LENGTH, {})]]
    return [piece for piece in pieces if piece is not None]


def text_of(pieces: list[OutputDelta]) -> str:
    return "".join(piece.text for piece in pieces)


WORDS = st.text(st.sampled_from("ab 日é👍.\n"), min_size=1, max_size=12)


@given(text=WORDS, stops=st.lists(st.text(st.sampled_from("ab 日é👍.\n"), min_size=1, max_size=4), max_size=3))
@settings(max_examples=400)
def test_no_piece_splits_a_character_or_leaks_a_stop(prompting, tokenizer, text, stops):
    pieces = feed(prompting, tokenizer.encode(text).ids, tuple(stops))
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    end, length = min(ends) if ends else (len(text), 0)
    assert text_of(pieces) == text[: end + length]
    assert "\ufffd" not in text_of(pieces)
    assert [piece.finish for piece in pieces[-1:]] == [FinishReason.STOP if ends else FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("last", "sampling", "stop_reason"),
    [(7, {}, 7), (9, {}, None), (2, {}, None), (2, {"ignore_eos": True}, 2)],
)
def test_a_stop_token_is_told_unless_it_ends_every_text(prompting, last, sampling, stop_reason):
    params = SamplingParams(max_tokens=3, seed=1, stop_token_ids=(7, 2), **sampling)
    answer = GenerationState(GenerationRequest(0, 0, [1], params, (), False, True), prompting, (2,))
    answer.feed(Tokens(R, Epoch(1), [Token(0, 5, None, None), Token(1, last, None, None)]))
    end = answer.feed(Finished(R, Epoch(1), 2, FinishReason.STOP, {}))
    assert end is not None and end.stop_reason == stop_reason


@given(text=WORDS)
@settings(max_examples=200)
def test_every_token_is_shown_once_where_its_text_begins(prompting, tokenizer, text):
    ids = tokenizer.encode(text).ids
    pieces = feed(prompting, ids)
    shown = [item for piece in pieces for item in piece.shown]
    assert [item.token.token_id for item in shown] == ids
    assert [item.offset for item in shown] == sorted(item.offset for item in shown)
    for item in shown:
        own = tokenizer.decode([item.token.token_id], skip_special_tokens=False)
        assert "\ufffd" in own or text[item.offset :].startswith(own)


def test_a_character_that_never_completes_shows_as_replacement(prompting, tokenizer):
    first_byte = tokenizer.encode("👍").ids[:1]
    assert text_of(feed(prompting, first_byte)) == "\ufffd"


@pytest.mark.parametrize(
    ("sampling", "include", "text"),
    [
        ({}, False, "Hi"),
        ({}, True, "Hi"),  # the end of text is a special token: not text even when it is kept
        ({"ignore_eos": True}, False, "Hi there"),
    ],
)
def test_the_end_of_text_token_is_no_text(prompting, tokenizer, sampling, include, text):
    ids = [*tokenizer.encode("Hi").ids, 2]
    ids += tokenizer.encode(" there").ids if "ignore_eos" in sampling else []
    assert text_of(feed(prompting, ids, include=include, **sampling)) == text


@pytest.mark.parametrize(("include", "text"), [(False, "The quick"), (True, "The quick brown")])
def test_a_stop_token_is_shown_only_if_asked(prompting, tokenizer, include, text):
    ids = tokenizer.encode("The quick brown").ids
    assert text_of(feed(prompting, ids, include=include, stop_token_ids=(ids[-1],))) == text


# Over HTTP


async def test_stop_strings_wait_for_min_tokens(client, rig):
    reply = await whole(client, stop=" quick", min_tokens=4, max_tokens=30)
    first, rest = reply["choices"][0]["text"].split(" quick", 1)
    assert (first, " quick" in rest) == ("The", False)
    assert rest.startswith(" brown fox")
    assert rig.workers[0].jobs[0].sampling.min_tokens == 4


@pytest.mark.parametrize("min_tokens", [1, 2])
async def test_a_stop_string_may_begin_before_min_tokens_and_end_behind(client, min_tokens):
    """vLLM ends such an answer, too."""
    reply = await whole(client, stop=" quick brown", min_tokens=min_tokens, max_tokens=30)
    assert reply["choices"][0]["text"] == "The"


@pytest.mark.parametrize(("include", "text"), [(None, "The quick brown"), (True, "The quick brown fox")])
async def test_a_stop_string_is_shown_only_if_asked(client, include, text):
    reply = await whole(client, stop=["zebra", " fox"], include_stop_str_in_output=include)
    choice = reply["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert reply["usage"]["completion_tokens"] == 4


async def test_the_stop_string_is_told_beside_the_end(client):
    """vLLM's clients read it to know which stop string ended the answer.

    openai-python raises where a field is missing.
    """
    said = {"messages": [{"role": "user", "content": FOX}], "max_tokens": 400}
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    asks = [("completions", {"prompt": FOX}), ("chat/completions", said), ("chat/completions", said | tools)]
    for path, fields in asks:
        for stop in ([" fox", "zebra"], ["zebra"]):
            reply = (await client.post(f"/v1/{path}", json=fields | {"stop": stop})).json()
            assert reply["choices"][0]["stop_reason"] == (" fox" if " fox" in stop else None)
            *others, last = await chunks(client, f"/v1/{path}", **fields, stop=stop)
            assert last["choices"][0]["stop_reason"] == reply["choices"][0]["stop_reason"]
            assert not any("stop_reason" in chunk["choices"][0] for chunk in others)


@pytest.mark.parametrize(("skip", "text"), [(None, "Hi"), (True, "Hi"), (False, "<|im_start|>Hi<|im_end|>")])
async def test_special_tokens_show_only_if_asked(client, tokenizer, skip, text):
    ids = [tokenizer.token_to_id("<|im_start|>"), *tokenizer.encode("Hi").ids, tokenizer.token_to_id("<|im_end|>")]
    fields = {"prompt": ids, "max_tokens": len(ids), "ignore_eos": True, "skip_special_tokens": skip}
    assert (await whole(client, **fields))["choices"][0]["text"] == text
    assert joined(await chunks(client, **fields)) == text


@pytest.mark.parametrize("prompt", [FOX, WILD, "👍" * 9])
async def test_chunks_hold_whole_characters(client, tokenizer, prompt):
    ids = tokenizer.encode(prompt).ids
    bodies = await chunks(client, prompt=prompt, max_tokens=2 * len(ids))
    assert joined(bodies) == prompt * 2
    assert all("\ufffd" not in choice["text"] for body in bodies for choice in body["choices"])


async def test_usage_comes_last_and_only_if_asked(client, tokenizer):
    counted = await chunks(client, stream_options={"include_usage": True})
    assert [body["choices"] for body in counted[-1:]] == [[]]
    num_prompt = len(tokenizer.encode(FOX).ids)
    assert counted[-1]["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 8,
        "total_tokens": num_prompt + 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert all("usage" not in body for body in counted[:-1])
    assert all("usage" not in body for body in await chunks(client))


async def test_continuous_usage_grows_to_the_total(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    bodies = await chunks(client, n=2, stream_options=options)
    counts = [body["usage"]["completion_tokens"] for body in bodies]
    assert counts == sorted(counts)
    assert counts[-1] == 16
    assert len(set(counts)) > 1


async def test_the_chunk_of_the_role_counts_no_token_yet(client):
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = (await client.post("/v1/chat/completions", json=ask | {"stream_options": options})).text
    counts = [json.loads(line)["usage"]["completion_tokens"] for line in text.split("data: ")[1:-1]]
    assert counts[0] == 0 and counts[-1] == 3


async def test_usage_has_what_was_guessed_right_and_in_vain(client, rig, monkeypatch):
    assert "completion_tokens_details" not in (await whole(client))["usage"]
    for worker in rig.workers:
        monkeypatch.setattr(worker, "drafts", (3, 2))
    details = {"accepted_prediction_tokens": 14, "rejected_prediction_tokens": 7}
    assert (await whole(client))["usage"]["completion_tokens_details"] == details


async def test_cached_tokens_are_those_that_prefill_tells(client, rig, monkeypatch):
    monkeypatch.setattr(rig.workers[0], "cached_tokens", 5)
    assert (await whole(client))["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


async def test_log_probabilities_of_a_stream_are_those_of_the_whole(client):
    one = (await whole(client, prompt=WILD, max_tokens=30, logprobs=1))["choices"][0]["logprobs"]
    parts = [c["logprobs"] for b in await chunks(client, prompt=WILD, max_tokens=30, logprobs=1) for c in b["choices"]]
    for key in one:
        assert list(itertools.chain.from_iterable(part[key] for part in parts)) == one[key]
    assert len(one["tokens"]) == 30


async def test_chat_log_probabilities_carry_bytes(client):
    say = [{"role": "user", "content": WILD}]
    bodies = await chunks(client, "/v1/chat/completions", messages=say, max_tokens=60, logprobs=True, top_logprobs=1)
    shown = [entry for b in bodies for c in b["choices"] for entry in c["logprobs"]["content"]]
    assert len(shown) == 60
    assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 1 for entry in shown)
    assert bytes(itertools.chain.from_iterable(entry["bytes"] for entry in shown)).decode().find("日本語") >= 0


async def test_a_chat_stream_opens_with_the_role_and_closes_with_the_reason(client):
    bodies = await chunks(client, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], n=2)
    for index in (0, 1):
        mine = [c for body in bodies for c in body["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]
    assert {body["object"] for body in bodies} == {"chat.completion.chunk"}
    assert len({body["id"] for body in bodies}) == 1


async def test_choices_are_numbered_over_prompts_and_n(client, rig):
    reply = await whole(client, prompt=["one", "two three"], n=2, max_tokens=2, echo=True)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][:3] for choice in reply["choices"]] == ["one", "one", "two", "two"]
    seeds = {len(job.token_ids): job.sampling.seed for job in rig.workers[0].jobs}
    assert {(len(job.token_ids), job.sampling.seed) for job in rig.workers[0].jobs} == set(seeds.items())


async def test_an_answer_goes_on_with_the_space_of_its_first_token(checkpoint):
    ggml = {"model": "llama", "tokens": ["<unk>", "▁", "</s>", "a", "▁a"], "scores": [0.0] * 5, "add_bos_token": False}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in ggml.items()}
    spaced = replace(checkpoint, build_tokenizer=lambda: build_tokenizer(metadata))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    workers = pair(script=[4, 3])
    async with gateway(replace(spaced, chat_template=template), workers) as rig, rig.client() as client:
        echoed = await whole(client, prompt="a a", echo=True, logprobs=1, max_tokens=2)
        assert echoed["choices"][0]["text"] == "a a aa"
        assert echoed["choices"][0]["logprobs"]["tokens"] == [" a", " a", " a", "a"]
        for is_open, text in ((True, " aa"), (False, "aa")):
            asked = {"messages": [{"role": "assistant", "content": "a"}], "continue_final_message": is_open}
            asked["add_generation_prompt"] = not is_open
            reply = await client.post("/v1/chat/completions", json=asked)
            assert reply.json()["choices"][0]["message"]["content"] == text


async def test_where_a_grammar_ends_the_answer_ends_though_end_of_text_is_ignored(client, rig):
    for fields in ({}, {"structured_outputs": {"regex": "ok"}}):
        await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "ignore_eos": True} | fields)
    assert [job.sampling.ignore_eos for job in rig.workers[0].jobs] == [True, False]


async def test_a_seed_is_kept_and_a_missing_one_drawn(client, rig):
    for seed in (7, -1, None, None):
        await whole(client, seed=seed)
    seeds = [job.sampling.seed for job in rig.workers[0].jobs]
    assert seeds[:2] == [7, 2**63 - 1]
    assert len(set(seeds)) == 4


async def test_no_alternatives_need_no_logprobs(client):
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": False, "top_logprobs": 0}
    reply = await client.post("/v1/chat/completions", json=ask)
    assert reply.status_code == 200 and reply.json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("calls", [{}, {"tool_calls": []}, {"tool_calls": None}, {"function_call": None}])
async def test_an_assistant_that_said_nothing_said_an_empty_text(client, calls):
    async def prompt(silent: dict) -> list[int]:
        messages = [{"role": "user", "content": "hi"}, silent, {"role": "user", "content": "well?"}]
        reply = await client.post("/tokenize", json={"messages": messages})
        assert reply.status_code == 200, reply.text
        return reply.json()["tokens"]

    silent = {"role": "assistant", "content": None} | calls
    assert await prompt(silent) == await prompt({"role": "assistant", "content": ""})
