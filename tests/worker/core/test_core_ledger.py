"""The ledger: every accepted request leaves once, and everything it says goes out in order."""

from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import Unavailable
from contracts.events import Failed, Finished, FinishReason, Prefilled, Token, Tokens
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.request import Job, Route, WorkerRef
from contracts.sampling import SamplingParams
from worker.core.attempt_table import MAX_CANCELLED, AttemptTable
from worker.core.role_handler import attempt_key

REF = WorkerRef(WorkerId("w"), Incarnation("1"), "http://w", "w:1")


def job(name: str = "r", epoch: int = 1, gateway: str = "g", timeout_s: float = 10.0) -> Job:
    route = Route(RequestId(name), Epoch(epoch), REF, REF)
    return Job(route, GatewayId(gateway), [1, 2], SamplingParams(max_tokens=2, seed=0), timeout_s)


def opened(ledger: AttemptTable, *args, now: float = 0.0, **kwargs):
    live = ledger.open(job(*args, **kwargs), now)
    assert live is not None
    return live


def test_a_request_is_known_until_its_end_and_not_after():
    ledger = AttemptTable()
    live = opened(ledger)
    assert ledger.get(RequestId("r")) is live and ledger.of(live.key) is live and len(ledger) == 1
    ledger.finish(live, 2, FinishReason.STOP)
    assert ledger.get(RequestId("r")) is None and ledger.of(live.key) is None and len(ledger) == 0


def test_the_same_job_twice_is_taken_once():
    ledger = AttemptTable()
    opened(ledger)
    assert ledger.open(job(), 1.0) is None
    assert ledger.num_stale == 1


def test_a_job_behind_its_cancel_is_not_taken_and_the_next_attempt_is():
    ledger = AttemptTable()
    for epoch in (2, 1):  # the later one, however they come
        ledger.cancelled(RequestId("r"), Epoch(epoch))
    assert [ledger.open(job(epoch=epoch), 0.0) for epoch in (1, 2)] == [None, None]
    assert (len(ledger), ledger.num_stale) == (0, 2)
    assert opened(ledger, epoch=3) and opened(ledger, "s")


def test_cancels_of_what_never_came_do_not_pile_up():
    ledger = AttemptTable()
    for number in range(MAX_CANCELLED + 1):
        ledger.cancelled(RequestId(f"{number}"), Epoch(1))
    assert opened(ledger, "0")
    assert ledger.open(job("1"), 0.0) is None and ledger.open(job(f"{MAX_CANCELLED}"), 0.0) is None


def test_another_epoch_is_not_this_request():
    ledger = AttemptTable()
    live = opened(ledger, epoch=2)
    assert ledger.of(attempt_key(RequestId("r"), Epoch(1))) is None
    assert ledger.of(attempt_key(RequestId("r"), Epoch(2))) is live


def test_events_come_out_in_order_by_gateway_and_once():
    ledger = AttemptTable()
    one, other = opened(ledger, "a"), opened(ledger, "b", gateway="h")
    one.stage("queue", 1.0)
    one.stage("prefill", 3.0)
    ledger.prefilled(one)
    ledger.token(one, Token(0, 5))
    ledger.token(other, Token(0, 6))
    ledger.finish(one, 1, FinishReason.LENGTH)
    ledger.report_state(other, "QUEUED")
    events, moves = ledger.take()
    stages_s = {"queue": 1.0, "prefill": 2.0}
    assert events[GatewayId("g")] == [
        Prefilled(RequestId("a"), Epoch(1), 0, stages_s),
        Tokens(RequestId("a"), Epoch(1), [Token(0, 5)]),
        Finished(RequestId("a"), Epoch(1), 1, FinishReason.LENGTH, stages_s),
    ]
    assert events[GatewayId("h")] == [Tokens(RequestId("b"), Epoch(1), [Token(0, 6)])]
    assert [(move.request_id, move.state) for move in moves] == [("b", "QUEUED")]
    assert ledger.take() == ({}, [])


def test_who_did_not_compute_the_prompt_tells_with_its_first_token_how_it_came_to_it():
    ledger = AttemptTable()
    decode = opened(ledger, "a")
    decode.stage("expect", 1.0)
    decode.stage("land", 3.0)
    ledger.token(decode, Token(1, 5))
    ledger.token(decode, Token(2, 5))
    first, second = ledger.take()[0][GatewayId("g")]
    assert isinstance(first, Tokens) and first.stages_s == {"expect": 1.0, "land": 2.0}
    assert isinstance(second, Tokens) and second.stages_s == {}


def test_a_failure_says_its_code_and_words():
    ledger = AttemptTable()
    ledger.fail(opened(ledger), Unavailable("the cable is out"))
    (event,) = ledger.take()[0][GatewayId("g")]
    assert isinstance(event, Failed) and (event.code, event.message) == ("unavailable", "the cable is out")


def test_who_leaves_says_nothing():
    ledger = AttemptTable()
    ledger.leave(opened(ledger))
    assert ledger.take() == ({}, []) and len(ledger) == 0


@given(st.lists(st.floats(0.1, 100.0), max_size=12), st.floats(0.0, 120.0))
def test_overdue_are_exactly_those_past_their_deadline(timeouts, now):
    ledger = AttemptTable()
    for number, timeout_s in enumerate(timeouts):
        opened(ledger, f"r{number}", timeout_s=timeout_s)
    overdue = {live.job.request_id for live in ledger.overdue(now)}
    assert overdue == {f"r{number}" for number, timeout_s in enumerate(timeouts) if timeout_s <= now}
