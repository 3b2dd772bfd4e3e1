"""Whether a step on a GPU waits for tokens, so that drafts can follow them: where that pays by what was measured."""

import pytest

from engine.sequence import Sequence
from engine.speculative.proposer import Draft
from engine.speculative.speculator import MAX_AWAITED, PROBE_PERIOD, Speculator
from tests.engine.speculative.drafting import KnowingProposer, sequence_of


def foretelling(ahead_s: float, waited_s: float, drafted_s: float) -> tuple[Speculator, Sequence]:
    """Return a speculator that knows steps of one answer, and an answer that it can foretell."""
    KnowingProposer.answers = {(1, 2): [3] * 1000}
    KnowingProposer.wrong = 0.0
    speculator, sequence = Speculator(KnowingProposer(), 3, 4096), sequence_of([1, 2])
    for _ in range(30):
        speculator.record_step(1, ahead_s, is_ahead=True)
        speculator.record_step(1, waited_s)
        speculator.record_step(4, drafted_s)
        speculator.record_draft(sequence, Draft((3, 3, 3)), 3)
    return speculator, sequence


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("answers", "wrong"):
        monkeypatch.setattr(KnowingProposer, name, getattr(KnowingProposer, name))


def test_drafts_that_promise_more_than_the_wait_costs_are_waited_for():
    speculator, sequence = foretelling(2.0, 2.3, 2.5)
    assert speculator.awaits([sequence])


def test_a_text_that_nobody_foretells_is_not_waited_for():
    speculator, _ = foretelling(2.0, 2.3, 2.5)
    assert not any(speculator.awaits([sequence_of([7, 8])]) for _ in range(3 * PROBE_PERIOD))


def test_what_waiting_never_gives_back_is_tried_now_and_then():
    speculator, sequence = foretelling(2.0, 9.0, 11.0)
    assert sum(speculator.awaits([sequence]) for _ in range(3 * PROBE_PERIOD)) == 3


def test_before_anything_is_known_a_draft_is_reason_enough():
    KnowingProposer.answers = {(1, 2): [3] * 1000}
    assert Speculator(KnowingProposer(), 3, 4096).awaits([sequence_of([1, 2])])


def test_nothing_is_drafted_behind_a_token_that_is_still_being_drawn():
    speculator, sequence = foretelling(2.0, 2.3, 2.5)
    sequence.num_pending = 1
    assert not speculator.awaits([sequence]) and not speculator.propose([sequence], 16)[0]


def test_a_large_batch_is_not_looked_through():
    speculator, sequence = foretelling(2.0, 2.3, 2.5)
    assert speculator.awaits([sequence] * MAX_AWAITED)
    assert not speculator.awaits([sequence] * (MAX_AWAITED + 1))
