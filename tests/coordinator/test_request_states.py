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
    RequestState,
    TransitionCheck,
    check_transition,
    require_end,
    to_markdown,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "request-states.md"
HANDOFF = [
    RequestState.PLACED,
    RequestState.QUEUED,
    RequestState.RESERVING,
    RequestState.HELD,
    RequestState.TRANSFERRING,
    RequestState.COMMITTED,
    RequestState.FINISHED,
]


def test_the_document_is_made_from_the_table():
    assert DOCUMENT.read_text() == to_markdown()


def test_a_handoff_is_legal_step_by_step():
    assert all(to in MOVES[state] for state, to in pairwise(HANDOFF))


@pytest.mark.parametrize("state", LIVE)
def test_every_live_request_can_end(state: RequestState):
    assert {RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED} <= REACHABLE[state]


@given(st.sampled_from(sorted(ENDS)), st.sampled_from(RequestState))
def test_an_end_is_an_end(end: RequestState, to: RequestState):
    assert check_transition(end, to) is not TransitionCheck.LEGAL


@given(st.sampled_from(HANDOFF), st.sampled_from(HANDOFF[1:]))
def test_reports_may_skip_and_are_late_when_overtaken(state: RequestState, to: RequestState):
    is_forward = HANDOFF.index(to) > HANDOFF.index(state)
    assert check_transition(state, to) is (TransitionCheck.LEGAL if is_forward else TransitionCheck.LATE)


@pytest.mark.parametrize(
    ("state", "to"),
    [
        (RequestState.COMMITTED, RequestState.LOCAL_DECODE),
        (RequestState.LOCAL_DECODE, RequestState.COMMITTED),
        (RequestState.CANCELLED, RequestState.COMMITTED),
        (RequestState.FINISHED, RequestState.FAILED),
    ],
)
def test_what_contradicts_is_not_legal(state: RequestState, to: RequestState):
    assert check_transition(state, to) is not TransitionCheck.LEGAL


def test_two_ways_to_decode_exclude_each_other():
    assert check_transition(RequestState.COMMITTED, RequestState.LOCAL_DECODE) is TransitionCheck.ILLEGAL
    assert check_transition(RequestState.LOCAL_DECODE, RequestState.COMMITTED) is TransitionCheck.ILLEGAL


def test_ends_hold_no_credit():
    assert not ENDS & (HOLDS_PREFILL | HOLDS_DECODE)


def test_credits_are_only_ever_given_back_within_an_attempt():
    for state in LIVE:
        for to in REACHABLE[state] - {RequestState.PLACED}:
            assert (to in HOLDS_DECODE) <= (state in HOLDS_DECODE)
            assert (to in HOLDS_PREFILL) <= (state in HOLDS_PREFILL)


def test_a_request_does_not_end_alive():
    with pytest.raises(ValueError, match="PLACED"):
        require_end(RequestState.PLACED)
