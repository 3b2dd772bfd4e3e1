"""When the next batch is due, by how long those before took."""

import math

import pytest

from engine.scheduler.launch_pacer import NUM_LAST, WAKING_S, LaunchPacer

DECODES, PROMPTS = (0, 1), (16, 1)


def paced(*spans_s: float, launch_s: float = 0.0) -> tuple[LaunchPacer, float]:
    """After batches of decodes, one behind the other, each begun on while the one before was computed. And when the
    last one landed.
    """
    pace, now_s = LaunchPacer(), 100.0
    pace.record_completion(PROMPTS, now_s - 1.0, now_s)
    for span_s in spans_s:
        pace.record_launch(launch_s)
        now_s += span_s
        pace.record_completion(DECODES, now_s - span_s - 0.001, now_s)
    return pace, now_s


def test_a_kind_that_was_never_seen_is_due_at_once():
    pace, now_s = paced(0.003)
    assert pace.due_s((0, 2), now_s) == -math.inf


def test_the_next_is_due_before_the_shortest_of_its_kind_would_be_done():
    pace, now_s = paced(0.005, 0.003, 0.004)
    assert pace.due_s(DECODES, now_s - 0.001) == pytest.approx(now_s + 0.003 - WAKING_S)


def test_what_was_long_ago_does_not_count():
    pace, now_s = paced(0.001, *[0.004] * NUM_LAST)
    assert pace.due_s(DECODES, now_s - 0.001) == pytest.approx(now_s + 0.004 - WAKING_S)


def test_a_batch_that_was_begun_on_late_is_done_later_and_counts_from_then():
    pace, now_s = paced(0.003)
    assert pace.due_s(DECODES, now_s + 0.01) == pytest.approx(now_s + 0.013 - WAKING_S)
    assert pace.record_completion(DECODES, now_s + 0.01, now_s + 0.012) == pytest.approx(0.002)


def test_what_was_computed_before_anybody_looked_is_forgotten_with_what_it_waited_for():
    pace, now_s = paced(0.3)
    assert pace.record_completion(DECODES, now_s, now_s + 0.3, was_late=True) == pytest.approx(0.3)
    assert pace.due_s(DECODES, now_s + 0.3) == -math.inf
    pace.record_completion(DECODES, now_s + 0.3, now_s + 0.31)
    assert pace.due_s(DECODES, now_s + 0.31) == pytest.approx(now_s + 0.32 - WAKING_S)


def test_hosts_that_take_long_or_more_than_once_longer_begin_earlier():
    pace, now_s = paced(*[0.003] * NUM_LAST, launch_s=0.001)
    assert pace.due_s(DECODES, now_s - 0.001) == pytest.approx(now_s + 0.002 - WAKING_S)
    pace.record_launch(0.03)
    assert pace.due_s(DECODES, now_s - 0.001) == pytest.approx(now_s + 0.002 - WAKING_S)
    pace.record_launch(0.0015)
    assert pace.due_s(DECODES, now_s - 0.001) == pytest.approx(now_s + 0.0015 - WAKING_S)
