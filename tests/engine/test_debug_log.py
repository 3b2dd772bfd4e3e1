"""What an operator reads at `TANDEM_LOG_LEVEL=debug`: where a request is, and why."""

import logging

import pytest

from contracts.errors import OutOfBlocks
from contracts.events import Token
from contracts.ids import RequestId
from engine.engine import Engine
from engine.loader import load_engine
from tests.e2e.tiny import save_tiny
from tests.engine.driving import answers, drain, greedy, request, settings

PROMPT = list(range(40))


@pytest.fixture
def engine(tmp_path, caplog) -> Engine:
    caplog.set_level(logging.DEBUG, "engine")
    nbytes = load_engine(settings(model=str(save_tiny(tmp_path)), kv_cache_nbytes=1 << 20)).layout.block_nbytes
    return load_engine(settings(model=str(tmp_path), kv_cache_nbytes=7 * nbytes))


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"]


def test_a_request_is_followed_from_its_first_step_to_its_end(engine, caplog):
    answers(engine, [PROMPT], greedy(3))
    assert lines(caplog)[:2] == [
        "request 0 begins: 0 of its 40 prompt tokens are cached",
        "a step of 0 answers and 40 tokens of prompts; 0 requests wait, 4 of 7 KV blocks are free",
    ]
    assert lines(caplog)[-1] == "request 0 is over here, after 3 tokens of its answer: 3 KV blocks are let go"
    caplog.clear()
    answers(engine, [PROMPT], greedy(3))
    assert lines(caplog)[0] == "request 0 begins: 32 of its 40 prompt tokens are cached"


def test_a_handoff_is_followed(engine, caplog):
    engine.reserve(request("a", PROMPT, greedy(3)))
    with pytest.raises(OutOfBlocks):
        engine.reserve(request("b", PROMPT * 2, greedy(3)))
    engine.release(RequestId("b"))
    engine.incoming_writer_ended(RequestId("a"))
    engine.adopt(RequestId("a"), Token(0, 7))
    drain(engine)
    engine.submit(request("c", PROMPT, greedy(3), handoff=True))
    drain(engine)
    engine.keep_local(RequestId("c"))
    found = lines(caplog)
    assert found[0] == "request a has 3 KV blocks reserved, 0 of its 40 prompt tokens are cached"
    assert found[1].startswith("request b finds no room for its KV yet: 6 KV blocks wanted, ")
    assert found[2] == "request a goes on here after token 0, its KV is complete"
    assert found[-1] == "request c is not handed over: it goes on here, after 41 tokens"


def test_a_preemption_is_told(engine, caplog):
    for index, name in enumerate("ab"):
        engine.submit(request(name, [index + 1] * 40, greedy(12)))
    drain(engine)
    assert any(line.startswith("request b is preempted: its ") for line in lines(caplog))


def test_nothing_is_said_where_nobody_asked(engine, caplog):
    caplog.set_level(logging.INFO, "engine")
    answers(engine, [PROMPT], greedy(3))
    assert not caplog.records
