"""Bodies as large as the gateway takes them: none keeps the event loop from the others for long."""

import threading

import msgspec
import pytest

from contracts.errors import RequestError
from gateway.api.openai.responses_input import to_chat
from gateway.api.openai.schema import ResponsesRequest, parse
from gateway.prompting.chat_template import Prompting
from gateway.prompting.pipeline import prepare_completion
from gateway.prompting.request_fields import CompletionRequest
from gateway.prompting.token_budget import ServingLimits
from gateway.tokenization.tokenizer import LONG_CHARS

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def test_calls_in_a_row_are_put_together_once(monkeypatch):
    """Each copied all before it: 65,536 of them took 9 s."""
    replaced, replace = [], msgspec.structs.replace

    def noted(message, **changes):
        replaced.append(changes.get("tool_calls"))
        return replace(message, **changes)

    monkeypatch.setattr(msgspec.structs, "replace", noted)
    said = {"role": "assistant", "content": "hm"}
    given = {"input": [CALL] * 100 + [{"role": "user", "content": "hi"}, said] + [CALL] * 50}
    first, _, last = to_chat(parse(msgspec.json.encode(given), ResponsesRequest)).messages
    assert (len(first.tool_calls or ()), last.content, len(last.tool_calls or ())) == (100, "hm", 50)
    assert sum(calls is not None for calls in replaced) == 2


@pytest.mark.parametrize("wrong", [0, 1, 500, 998, 999])
def test_the_one_wrong_bias_among_many_is_found_by_halves(monkeypatch, wrong):
    """Each was tried by itself: half a million took seconds."""
    num_tries, convert = 0, msgspec.convert

    def counted(*args, **options):
        nonlocal num_tries
        num_tries += 1
        return convert(*args, **options)

    monkeypatch.setattr(msgspec, "convert", counted)
    bias = {str(token): "x" if token == wrong else "1" for token in range(1000)}
    with pytest.raises(RequestError) as refused:
        parse(msgspec.json.encode({"prompt": "hi", "logit_bias": bias}), CompletionRequest)
    assert refused.value.param == f"logit_bias.{wrong}" and num_tries < 20


async def test_tokens_are_told_without_a_look_at_each(rig, client, monkeypatch):
    """FastAPI's took seconds for millions of them."""
    looked_at = []
    monkeypatch.setattr("fastapi.routing.jsonable_encoder", lambda body, **_: looked_at.append(body) or body)
    asked = {"prompt": "one two one", "return_token_strs": True}
    told = (await client.post("/tokenize", json=asked)).json()
    assert told["token_strs"] == ["one", "Ġtwo", "Ġone"] and told["count"] == len(told["tokens"]) == 3
    reply = await client.post("/detokenize", json={"tokens": told["tokens"]})
    assert reply.json() == {"prompt": "one two one"} and reply.headers["content-type"] == "application/json"
    assert not looked_at


async def test_bad_words_that_are_long_together_are_tokenized_beside_the_event_loop(rig, client, monkeypatch):
    prompting, threads, encode = rig.front.prompting, {}, rig.front.prompting._encode

    def noted(text: str, add_special_tokens: bool) -> list[int]:
        threads[text] = threading.current_thread()
        return encode(text, add_special_tokens)

    monkeypatch.setattr(prompting, "_encode", noted)
    words = [f"{number} " * 200 for number in range(LONG_CHARS // 400)]
    asked = {"prompt": "one two", "max_tokens": 2, "bad_words": words}
    assert (await client.post("/v1/completions", json=asked)).status_code == 200
    assert len(rig.workers[0].jobs[0].sampling.bad_words) == 2 * len(words)
    assert threading.current_thread() not in {threads[text] for word in words for text in (word, " " + word)}


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        ({"allowed_token_ids": list(range(49152)), "n": 128, "prompt": ["a", "b"]}, "n"),
        ({"logit_bias": {str(token): 1 for token in range(49152)}, "prompt": ["a"] * 128}, "prompt"),
        ({"structured_outputs": {"choice": [f"{number} " * 400 for number in range(1000)]}, "n": 100}, "n"),
    ],
    ids=["allowed", "bias", "grammar"],
)
async def test_what_many_answers_carry_together_is_limited(checkpoint, wishes, param):
    """Each of 128 jobs had a copy of one body of 6 MB.

    No worker kept its place in the registry while it read them.
    """
    prompting, limits = Prompting(checkpoint), ServingLimits(2048, (2,), 1024)
    request = parse(msgspec.json.encode({"prompt": "hi", **wishes}), CompletionRequest)
    with pytest.raises(RequestError, match="bytes together; ask for fewer at once") as refused:
        await prepare_completion(request, prompting, limits)
    assert refused.value.param == param
    few = msgspec.structs.replace(request, n=1, prompt="hi")
    assert len(await prepare_completion(few, prompting, limits)) == 1


async def test_a_token_that_is_allowed_twice_is_told_once(rig, client):
    asked = {"prompt": "one two", "max_tokens": 2, "allowed_token_ids": [7, 5] * 1000}
    assert (await client.post("/v1/completions", json=asked)).status_code == 200
    assert rig.workers[0].jobs[0].sampling.allowed_token_ids == (7, 5)


def test_the_number_that_no_float_holds_is_found_among_many():
    body = b'{"prompt": "x", "y": {"z": [[%s1e999]]}}' % (b"1," * 1000)
    with pytest.raises(RequestError) as refused:
        parse(body, CompletionRequest)
    assert refused.value.param == "y.z[0][1000]"
