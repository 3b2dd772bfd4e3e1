"""Rates that placement relies on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.core.main import engine_settings
from worker.core.status import RATE_WINDOW_S, Rate
from worker.settings import WorkerSettings


def test_the_first_measurement_counts_whole():
    rate = Rate()
    rate.add(100, 0.5)
    assert rate.value == pytest.approx(200.0)


def test_idle_steps_do_not_count():
    rate = Rate()
    rate.add(0, 5.0)
    assert rate.value == 0.0
    rate.add(10, 0.0)
    assert rate.value == 0.0


def test_nothing_done_counts_nowhere_however_little_is_enough():
    rate = Rate()
    rate.add(10, 1.0, least=0)
    rate.add(0, 5.0, least=0)
    assert rate.value == pytest.approx(10.0)


def test_a_step_with_little_to_do_says_nothing_of_the_speed():
    rate = Rate()
    rate.add(20, 0.22, least=256)  # a first short question, on a machine that is not warm
    assert rate.value == 0.0
    rate.add(512, 0.5, least=256)
    rate.add(255, 2.0, least=256)
    assert rate.value == pytest.approx(1024.0)


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0.001, 5.0)), min_size=1, max_size=30))
def test_a_rate_stays_between_the_slowest_and_the_fastest(steps):
    rate = Rate()
    for amount, span_s in steps:
        rate.add(amount, span_s)
    rates = [amount / span_s for amount, span_s in steps]
    assert min(rates) * (1 - 1e-9) <= rate.value <= max(rates) * (1 + 1e-9)


def test_a_change_is_followed_within_the_window():
    rate = Rate()
    rate.add(1000, 1.0)
    for _ in range(2):
        rate.add(int(10 * RATE_WINDOW_S), RATE_WINDOW_S)
    assert rate.value == pytest.approx(10.0)


def test_a_step_in_which_the_process_was_stopped_says_nothing_of_the_speed():
    rate = Rate()
    for stopped_s in (0.0, 60.0, 0.0, 60.0):
        rate.add(1000, 1.0 + stopped_s)
    assert rate.value == pytest.approx(1000.0)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_no_device_keeps_to_a_gap_unless_it_is_told(device, monkeypatch):
    monkeypatch.setattr("worker.core.main.resolve_device", lambda name: name)  # there need be no GPU
    for asked, objective_s in (({}, 0.0), ({"itl_objective_ms": 8}, 0.008)):
        settings = WorkerSettings(**{"device": device, **asked})
        assert engine_settings(settings).itl_objective_s == objective_s
