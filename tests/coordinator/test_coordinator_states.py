"""The table of states: what may follow what, and that documents and scripts are made from it."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.request_states import (
    ENDS,
    HOLDS_DECODE,
    HOLDS_PREFILL,
    LIVE,
    MOVES,
    REACHABLE,
    State,
    Verdict,
    judge,
    require_end,
    to_markdown,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "request-states.md"
HANDOFF = [State.PLACED, State.QUEUED, State.RESERVING, State.HELD, State.TRANSFERRING, State.COMMITTED, State.FINISHED]


def test_the_document_is_made_from_the_table():
    assert DOCUMENT.read_text() == to_markdown()


def test_a_handoff_is_legal_step_by_step():
    assert all(to in MOVES[state] for state, to in pairwise(HANDOFF))


@pytest.mark.parametrize("state", LIVE)
def test_every_live_request_can_end(state: State):
    assert {State.FINISHED, State.FAILED, State.CANCELLED} <= REACHABLE[state]


@given(st.sampled_from(sorted(ENDS)), st.sampled_from(State))
def test_an_end_is_an_end(end: State, to: State):
    assert judge(end, to) is not Verdict.LEGAL


@given(st.sampled_from(HANDOFF), st.sampled_from(HANDOFF[1:]))
def test_reports_may_skip_and_are_late_when_overtaken(state: State, to: State):
    is_forward = HANDOFF.index(to) > HANDOFF.index(state)
    assert judge(state, to) is (Verdict.LEGAL if is_forward else Verdict.LATE)


@pytest.mark.parametrize(
    ("state", "to"),
    [
        (State.COMMITTED, State.LOCAL_DECODE),
        (State.LOCAL_DECODE, State.COMMITTED),
        (State.CANCELLED, State.COMMITTED),
        (State.FINISHED, State.FAILED),
    ],
)
def test_what_contradicts_is_not_legal(state: State, to: State):
    assert judge(state, to) is not Verdict.LEGAL


def test_two_ways_to_decode_exclude_each_other():
    assert judge(State.COMMITTED, State.LOCAL_DECODE) is Verdict.ILLEGAL
    assert judge(State.LOCAL_DECODE, State.COMMITTED) is Verdict.ILLEGAL


def test_ends_hold_no_credit():
    assert not ENDS & (HOLDS_PREFILL | HOLDS_DECODE)


def test_credits_are_only_ever_given_back_within_an_attempt():
    for state in LIVE:
        for to in REACHABLE[state] - {State.PLACED}:
            assert (to in HOLDS_DECODE) <= (state in HOLDS_DECODE)
            assert (to in HOLDS_PREFILL) <= (state in HOLDS_PREFILL)


def test_a_request_does_not_end_alive():
    with pytest.raises(ValueError, match="PLACED"):
        require_end(State.PLACED)
