"""Structured output: every finished answer obeys its grammar, whoever else is in the batch and wherever it decodes."""

import json
import re
import threading

import pytest
from llguidance import LLMatcher
from msgspec import structs
from tokenizers import Tokenizer

from checkpoint import grammar_compiler as guidance
from checkpoint import open_checkpoint
from contracts.errors import RequestError
from contracts.events import FinishReason, Token
from contracts.ids import RequestId
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import StepOutput
from engine.sampling.grammar_masks import LARGE
from tests.engine.driving import drain, greedy, request, settings, tokens_of
from tests.engine.tiny_models import VOCAB, save_tiny
from tests.waiting import until

pytestmark = pytest.mark.slow

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value: dict) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(value))


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


@pytest.fixture(scope="module")
def tokenizer():
    return open_checkpoint("").tokenizer()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(settings(dtype="auto", kv_cache_nbytes=128 << 20))


def ask(engine: Engine, tokenizer, *grammars: str, **sampling) -> list[str]:
    """All at once, each with its own grammar; the answers as text."""
    for index, grammar in enumerate(grammars):
        prompt = tokenizer.encode(f"Question {index}. Answer: ").ids
        params = greedy(80, grammar=grammar, ignore_eos=False, **sampling)
        engine.submit(request(str(index), prompt, params))
    outputs = drain(engine)
    ended = {end.request_id: end.reason for output in outputs for end in output.ended}
    assert set(ended.values()) == {FinishReason.STOP}, "the grammar ends each of these answers"
    return [tokenizer.decode(tokens_of(outputs, str(index))) for index in range(len(grammars))]


def test_a_json_schema_is_obeyed(engine, tokenizer):
    (text,) = ask(engine, tokenizer, schema(PERSON))
    person = json.loads(text)
    assert set(person) == {"name", "age"} and isinstance(person["age"], int) and person["age"] <= 150


def test_a_tokenizer_may_have_more_tokens_than_its_model(tmp_path):
    """A padding token that fine-tuning added, and no row of the output head."""
    save_tiny(tmp_path, "llama")
    file = str(tmp_path / "tokenizer.json")
    larger = Tokenizer.from_file(file)
    larger.add_tokens([f"<{index}>" for index in range(100)])
    larger.save(file)
    assert larger.get_vocab_size() > VOCAB
    (text,) = ask(load_engine(settings(model=str(tmp_path))), larger, regex("[0-9]{3}-[0-9]{2}"))
    assert re.fullmatch("[0-9]{3}-[0-9]{2}", text.removesuffix(larger.decode([1])))


def test_each_row_of_a_batch_obeys_its_own(engine, tokenizer):
    grammars = [regex("[0-9]{3}-[0-9]{2}"), schema({"enum": ["red", "green"]}), regex("(yes|no)"), schema(PERSON)]
    together = ask(engine, tokenizer, *grammars)
    assert re.fullmatch("[0-9]{3}-[0-9]{2}", together[0])
    assert json.loads(together[1]) in ("red", "green")
    assert together[2] in ("yes", "no")
    json.loads(together[3])
    assert ask(engine, tokenizer, grammars[0])[0] == together[0], "the company changes nothing"


def test_requests_with_the_same_grammar_compile_it_once_a_lane_and_obey_it_each(engine, tokenizer, monkeypatch):
    monkeypatch.setattr("engine.sampling.grammar_masks.NUM_LANES", 2)
    compiled, compile_ = [], guidance.compiled

    def noted(*args):
        compiled.append(args)
        return compile_(*args)

    monkeypatch.setattr("engine.sampling.grammar_masks.compiled", noted)
    grammar = regex("[a-z]{5}[0-9]{5}")
    for index in range(4):
        params = greedy(40, grammar=grammar, ignore_eos=False, temperature=3.0)
        engine.submit(request(str(index), tokenizer.encode("Answer: ").ids, structs.replace(params, seed=index)))
    outputs = drain(engine)
    texts = [tokenizer.decode(tokens_of(outputs, str(index))).removesuffix("<|im_end|>") for index in range(4)]
    assert all(re.fullmatch("[a-z]{5}[0-9]{5}", text) for text in texts) and len(set(texts)) == 4
    ask(engine, tokenizer, grammar)
    assert len(compiled) == 2


def test_sampling_at_a_high_temperature_still_obeys(engine, tokenizer):
    texts = {ask(engine, tokenizer, regex("[a-z]{5}"), temperature=2.0, seed=seed)[0] for seed in range(6)}
    assert len(texts) > 1
    assert all(re.fullmatch("[a-z]{5}", text) for text in texts)


def test_it_wins_over_min_tokens(engine, tokenizer):
    (text,) = ask(engine, tokenizer, regex("ok"), min_tokens=20)
    assert text == "ok"


def test_decode_goes_on_where_token_0_stopped(engine, tokenizer):
    """The handoff carries tokens and KV alone; decode's grammar starts from token 0."""
    prompt, params = tokenizer.encode("Answer: ").ids, greedy(80, grammar=schema(PERSON), ignore_eos=False)
    engine.submit(request("whole", prompt, params))
    expected = tokens_of(drain(engine), "whole")
    engine.submit(request("prefill", prompt, params, handoff=True))
    token_0 = tokens_of(drain(engine), "prefill")[0]
    reservation = engine.reserve(request("decode", prompt, params))
    copy_pages(engine, "prefill", [int(block) for block in reservation.blocks])
    engine.adopt(reservation.request_id, Token(0, token_0))
    engine.incoming_writer_ended(reservation.request_id)
    engine.release(request("prefill", prompt, params).request_id)
    assert [token_0, *tokens_of(drain(engine), "decode")] == expected


def copy_pages(engine: Engine, name: str, blocks: list[int]) -> None:
    held = list(engine.sequences[request(name, [1], greedy()).request_id].blocks)
    engine.pool_bytes[:, blocks] = engine.pool_bytes[:, held[: len(blocks)]]


@pytest.mark.parametrize("grammar", [regex("(a"), schema({"type": "no-such-type"}), "not a grammar at all"])
def test_a_grammar_that_does_not_compile_fails_its_request_alone(engine, tokenizer, grammar):
    prompt = tokenizer.encode("Answer: ").ids
    engine.submit(request("bad", prompt, greedy(8, grammar=grammar)))
    engine.submit(request("good", prompt, greedy(8)))
    outputs = drain(engine)
    (failure,) = (failure for output in outputs for failure in output.failed)
    assert failure.request_id == "bad" and failure.message
    assert len(tokens_of(outputs, "good")) == 8
    engine.check()


def test_nothing_is_kept_of_a_request_that_is_gone(engine, tokenizer):
    ask(engine, tokenizer, regex("a+b"))
    assert not engine.grammars._open


def test_a_schema_that_refers_and_refers_does_not_end_the_engine(engine, tokenizer):
    links = {f"a{at}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{at + 1}"}}} for at in range(3000)}
    (text,) = ask(engine, tokenizer, schema({"$defs": links | {"a3000": {"enum": ["x"]}}, "$ref": "#/$defs/a2999"}))
    assert json.loads(text) in ({}, {"x": "x"})


def long(kind: str) -> str:
    """Another for each test: what was compiled once is there."""
    return schema({"enum": [f"{number} is one of many {kind} values" for number in range(1000)]})


@pytest.fixture
def held_up(monkeypatch):
    """Compiling goes on when this is set."""
    goes_on, compile_ = threading.Event(), guidance.compiled

    def compiled(*args):
        assert goes_on.wait(60)
        return compile_(*args)

    monkeypatch.setattr("engine.sampling.grammar_masks.compiled", compiled)
    yield goes_on
    goes_on.set()


def until_done(engine, outputs):
    def is_done():
        if engine.has_work():
            outputs.append(engine.step())
            engine.check()
        return not engine.has_work()

    until(is_done, 60.0, period_s=0.001)


@pytest.mark.parametrize("is_large", [True, False])
def test_no_answer_waits_while_a_grammar_is_compiled_for_long(engine, tokenizer, held_up, is_large):
    grammar = long("small") if is_large else schema({"enum": ["this one is one of many small values"]})
    assert (len(grammar) >= LARGE) == is_large
    prompt = tokenizer.encode("Answer: ").ids
    engine.submit(request("guided", prompt, greedy(40, grammar=grammar, ignore_eos=False)))
    engine.submit(request("plain", prompt, greedy(8)))
    assert engine.stats().num_waiting == 2
    outputs = [engine.step() for _ in range(9)]
    assert len(tokens_of(outputs, "plain")) == 8 and not any(
        s.request_id == "guided" for o in outputs for s in o.sampled
    )
    assert engine.has_work() and engine.step() == StepOutput() and engine.stats().num_waiting == 1
    held_up.set()
    until_done(engine, outputs)
    assert json.loads(tokenizer.decode(tokens_of(outputs, "guided"))).endswith("is one of many small values")


def test_a_request_may_go_while_its_grammar_is_compiled(engine, tokenizer, held_up):
    engine.submit(request("gone", tokenizer.encode("Answer: ").ids, greedy(40, grammar=long("forgotten"))))
    engine.step()
    engine.release(RequestId("gone"))
    held_up.set()
    assert not engine.has_work() and not engine.grammars._open
    engine.check()


def test_no_answer_waits_while_a_grammar_that_came_from_elsewhere_is_compiled(engine, tokenizer, held_up):
    prompt = tokenizer.encode("Answer: ").ids
    params = greedy(40, grammar=long("foreign"), ignore_eos=False)
    reservation = engine.reserve(request("guided", prompt, params))
    quote = tokenizer.encode('"').ids[0]
    engine.adopt(reservation.request_id, Token(0, quote))
    engine.incoming_writer_ended(reservation.request_id)
    with pytest.raises(KeyError):
        engine.adopt(reservation.request_id, Token(0, quote))
    engine.submit(request("plain", prompt, greedy(8)))
    outputs = [engine.step() for _ in range(9)]
    assert len(tokens_of(outputs, "plain")) == 8 and engine.has_work()
    held_up.set()
    until_done(engine, outputs)
    answer = tokenizer.decode([quote, *tokens_of(outputs, "guided")])
    assert json.loads(answer).endswith("is one of many foreign values")


def test_a_grammar_that_leads_nowhere_is_the_clients_mistake_and_said_in_a_line(engine, tokenizer):
    """Nothing of the answer, and no state of the library."""
    grammar = LLMatcher.grammar_from_lark('start: "a" start')
    engine.submit(request("lost", tokenizer.encode("Answer: ").ids, greedy(40, grammar=grammar, ignore_eos=False)))
    engine.submit(request("plain", tokenizer.encode("Answer: ").ids, greedy(8)))
    outputs = drain(engine)
    (failure,) = [failed for output in outputs for failed in output.failed]
    assert (failure.request_id, failure.code) == ("lost", RequestError.code)
    assert failure.message.startswith("the grammar of this answer") and "\n" not in failure.message
    assert "Tokens:" not in failure.message and len(tokens_of(outputs, "plain")) == 8
    engine.check()


def test_a_grammar_needs_no_thread_that_is_yet_to_be_started(tokenizer, monkeypatch):
    """There may be none left when it comes, and the step of all would end with its request."""
    engine, prompt = load_engine(settings(dtype="auto")), tokenizer.encode("Answer: ").ids

    def lacking(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", lacking)
    grammars = {"small": schema({"enum": ["this one is one of many lone values"]}), "large": long("lone")}
    for name, grammar in grammars.items():
        engine.submit(request(name, prompt, greedy(40, grammar=grammar, ignore_eos=False)))
    engine.submit(request("plain", prompt, greedy(8)))
    reservation = engine.reserve(request("foreign", prompt, greedy(40, grammar=grammars["small"], ignore_eos=False)))
    quote = tokenizer.encode('"').ids[0]
    engine.adopt(reservation.request_id, Token(0, quote))
    engine.incoming_writer_ended(reservation.request_id)
    outputs: list[StepOutput] = []
    until_done(engine, outputs)
    texts = {name: tokenizer.decode(tokens_of(outputs, name)) for name in grammars}
    texts["foreign"] = tokenizer.decode([quote, *tokens_of(outputs, "foreign")])
    assert all(json.loads(text).endswith("is one of many lone values") for text in texts.values())
    assert len(tokens_of(outputs, "plain")) == 8 and not engine.grammars._open
