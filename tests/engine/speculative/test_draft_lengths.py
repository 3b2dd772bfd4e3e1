"""How many tokens of a draft are verified: as many as pay by what was measured."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculative.acceptance_rates import AcceptanceRates
from engine.speculative.draft_lengths import MIN_GAIN, choose_lengths
from engine.speculative.proposer import Draft
from engine.speculative.row_times import RowTimes
from engine.speculative.speculator import Speculator
from tests.engine.speculative.drafting import KnowingProposer, sequence_of


def linear(base: float, per_row: float):
    return lambda num_rows: base + per_row * num_rows


def test_rows_that_cost_nothing_are_all_taken():
    assert choose_lengths([[0.5, 0.2, 0.1]], 1, 16, linear(1, 0)) == [3]


def test_rows_that_cost_as_much_as_a_step_are_not_worth_a_chance():
    assert choose_lengths([[0.9, 0.8, 0.7]], 1, 16, linear(0, 1)) == [0]


def test_drafts_get_shorter_as_the_batch_grows_and_rows_get_dear():
    def step_s(rows):  # flat up to 16 rows, as where weights are read, then by the row
        return 16 + max(0, rows - 16)

    lengths = [choose_lengths([[0.6, 0.36, 0.2]] * n, n, 64, step_s) for n in (1, 4, 8, 16)]
    assert [sum(each) / len(each) for each in lengths] == sorted(
        (sum(each) / len(each) for each in lengths), reverse=True
    )
    assert lengths[0] == [3] and lengths[-1] == [0] * 16


def test_the_likeliest_tokens_of_all_drafts_come_first():
    assert choose_lengths([[0.9, 0.1], [0.8, 0.7], []], 3, 3, linear(1, 0)) == [1, 2, 0]


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=4).map(lambda c: sorted(c, reverse=True)), min_size=1, max_size=6),
    st.floats(0.01, 10),
    st.floats(0, 1),
    st.integers(0, 30),
)
def test_no_other_number_of_the_likeliest_tokens_promises_more(chances, base, per_row, max_rows):
    num_rows, step_s = len(chances), linear(base, per_row)
    lengths = choose_lengths(chances, num_rows, max_rows, step_s)
    assert all(length <= len(each) for length, each in zip(lengths, chances, strict=True)) and sum(lengths) <= max_rows

    def speed(count: int) -> float:
        best = sorted((chance for each in chances for chance in each), reverse=True)[:count]
        return (num_rows + sum(best)) / step_s(num_rows + count) / (MIN_GAIN if count == 0 else 1)

    most = min(sum(map(len, chances)), max_rows)
    chosen = (num_rows + sum(sum(each[:n]) for each, n in zip(chances, lengths, strict=True))) / step_s(
        num_rows + sum(lengths)
    )
    if sum(lengths):
        assert chosen == pytest.approx(max(speed(count) for count in range(most + 1)), rel=0.011)


def test_times_of_rows_are_learned_and_follow_the_level():
    times = RowTimes()
    for _ in range(50):
        for rows, seconds in ((1, 0.010), (2, 0.011), (4, 0.014)):
            times.record(rows, seconds)
    assert times.step_s(1) == pytest.approx(0.010, rel=0.02) and times.step_s(3) == pytest.approx(0.0125, rel=0.02)
    for _ in range(50):  # longer contexts: all sizes take twice as long, of which one is seen
        times.record(1, 0.020)
    assert times.step_s(4) == pytest.approx(0.028, rel=0.15)


def test_sizes_of_a_class_are_known_together_and_more_rows_never_take_less():
    """One step of 33 rows that was short does not make it the best size for drafts."""
    times = RowTimes()
    for rows in np.random.default_rng(0).permutation(np.repeat(np.arange(16, 48), 4)).tolist():
        times.record(rows, 0.001 * rows)
    times.record(33, 0.020)
    spans = [times.step_s(rows) for rows in range(16, 64)]
    assert spans == sorted(spans)
    assert times.step_s(33) == pytest.approx(0.033, rel=0.1) and times.step_s(16) == pytest.approx(0.016, rel=0.1)


def test_a_step_in_which_the_process_stood_still_says_nothing():
    times = RowTimes()
    for _ in range(20):
        times.record(1, 0.010)
    times.record(1, 5.0)
    assert times.step_s(1) == pytest.approx(0.010)


def test_an_unseen_size_is_taken_to_cost_half_of_what_rows_cost():
    times = RowTimes()
    times.record(2, 0.010)
    assert times.step_s(4) == pytest.approx(0.015)


def test_a_wrong_drafter_is_believed_less_and_a_right_one_more():
    rates, sequence, draft = AcceptanceRates(), sequence_of([1, 2]), Draft((5, 6, 7), strength=2)
    before = rates.chances(sequence, draft)
    for _ in range(20):
        rates.record(sequence, draft, 0)
    after = rates.chances(sequence, draft)
    assert after[0] < 0.1 < before[0] and after == sorted(after, reverse=True)
    other = Draft((5, 6, 7), strength=8)
    for _ in range(40):
        rates.record(sequence_of([3]), other, 3)
    assert rates.chances(sequence_of([4]), other)[2] > 0.85
    assert rates.chances(sequence_of([4]), draft)[0] < 0.2, "each strength by itself"


def test_what_never_pays_is_tried_again_now_and_then():
    KnowingProposer.answers = {(1, 2): [3] * 1000}
    speculator, sequence, drafted = Speculator(KnowingProposer(), 3, 4096), sequence_of([1, 2]), []
    for _ in range(1000):
        (draft,) = speculator.propose([sequence], 16)
        drafted.append(len(draft))
        if draft:
            speculator.record_draft(sequence, draft, 0)
        speculator.record_step(1 + len(draft), 1.0 + len(draft))
    assert 0 < sum(drafted[500:]) < 50


@pytest.mark.parametrize(
    ("sampling", "limit"), [({}, 3), ({"max_tokens": 3}, 2), ({"max_tokens": 1}, 0), ({"speculate": False}, 0)]
)
def test_no_token_is_drafted_that_the_answer_has_no_room_for(sampling, limit):
    KnowingProposer.answers = {(1, 2): [3] * 1000}
    speculator = Speculator(KnowingProposer(), 3, 4096, is_adaptive=False)
    sequence = sequence_of([1, 2])
    sequence.sampling = sequence.sampling.__class__(**{"max_tokens": 100, "seed": 1} | sampling)
    assert len(speculator.propose([sequence], 16)[0]) == limit
