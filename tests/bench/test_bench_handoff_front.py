"""What the front of bench.handoff.gpu makes of events that its threads hear in another order."""

import pytest

from bench.handoff.front import Answers
from bench.handoff.migration import MovingAnswers
from contracts.events import Failed, Finished, FinishReason, Moved, Token, Tokens
from contracts.ids import Epoch, RequestId

NAME, EPOCH = RequestId("r"), Epoch(1)
TOKENS = [30, 10, 20]


def hear(answers, worker, *indices, at=0.0):
    answers.take(worker, Tokens(NAME, EPOCH, [Token(index, TOKENS[index]) for index in indices]), at)


def test_an_answer_is_in_order_whoever_is_heard_first():
    answers = Answers()
    hear(answers, "decode", 1)
    hear(answers, "decode", 2)
    hear(answers, "prefill", 0)
    assert answers.ids("r") == dict(enumerate(TOKENS))


def test_an_answer_has_no_end_before_all_its_tokens_are_heard():
    answers = Answers()
    hear(answers, "decode", 1, 2)
    answers.take("decode", Finished(NAME, EPOCH, 3, FinishReason.LENGTH, {}), 0.0)
    with pytest.raises(TimeoutError):
        answers.wait(["r"], 0)
    hear(answers, "prefill", 0)
    answers.wait(["r"], 0)


def test_tokens_stay_where_they_are_when_the_first_is_lacking():
    answers = Answers()
    hear(answers, "decode", 1)
    hear(answers, "decode", 2)
    assert answers.ids("r") == {1: TOKENS[1], 2: TOKENS[2]}


def test_it_is_known_whether_tokens_were_heard_in_order():
    answers = Answers()
    hear(answers, "decode", 1, at=1.0)
    hear(answers, "decode", 2, at=2.0)
    assert answers.is_heard_in_order("r")
    hear(answers, "prefill", 0, at=1.5)
    assert not answers.is_heard_in_order("r")


def test_a_token_that_a_destination_repeats_counts_when_it_was_first_heard():
    answers = MovingAnswers()
    hear(answers, "source", 0, 1, at=1.0)
    answers.take("source", Moved(NAME, EPOCH), 1.5)
    hear(answers, "destination", 1, 2, at=2.0)
    assert answers.moved == {"r": 1} and answers.times("r") == [1.0, 1.0, 2.0]
    assert [heard.worker for heard in answers.tokens["r"].values()] == ["source", "source", "destination"]
    assert answers.num_contradicted == 0
    answers.take("destination", Tokens(NAME, Epoch(2), [Token(2, 99)]), 3.0)
    assert answers.num_contradicted == 1 and answers.ids("r") == dict(enumerate(TOKENS))


def test_an_answer_goes_on_when_its_migration_fails():
    answers = MovingAnswers()
    answers.take("source", Failed(NAME, Epoch(2), "unavailable", "no pages"), 0.0)
    assert answers.failures == ["unavailable: no pages"] and not answers.ends
    answers.take("source", Failed(NAME, EPOCH, "internal", "it broke"), 0.0)
    assert answers.ends == {"r": "internal: it broke"}
