"""How long a failure to reach a peer counts."""

import pytest

from contracts.ids import Incarnation
from kv_transfer.links.path_health import FIRST_S, MAX_S, PathHealth

A, B = Incarnation("a"), Incarnation("b")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def paths(clock: Clock) -> PathHealth:
    return PathHealth(clock)


def test_a_failure_counts_for_a_while_and_only_there(clock, paths):
    paths.failed(A)
    assert paths.bad() == (A,)
    clock.now_s += FIRST_S
    assert paths.bad() == ()


def test_failures_at_once_count_once(clock, paths):
    for _ in range(5):
        paths.failed(A)
    clock.now_s += FIRST_S
    assert paths.bad() == ()


def test_each_further_failure_counts_twice_as_long_up_to_a_limit(clock, paths):
    for number in range(8):
        paths.failed(A)
        span_s = min(FIRST_S * 2**number, MAX_S)
        clock.now_s += span_s - 0.1
        assert paths.bad() == (A,)
        clock.now_s += 0.1
        assert paths.bad() == ()


def test_a_success_ends_it_and_begins_the_count_anew(clock, paths):
    for _ in range(3):
        paths.failed(A)
        clock.now_s += MAX_S
    paths.failed(A)
    paths.failed(B)
    paths.worked(A)
    assert paths.bad() == (B,)
    paths.failed(A)
    clock.now_s += FIRST_S
    assert paths.bad() == ()


def test_a_peer_that_nobody_tries_again_is_forgotten(clock, paths):
    paths.failed(A)
    clock.now_s += FIRST_S + MAX_S
    assert paths.bad() == ()
    paths.failed(A)
    clock.now_s += FIRST_S
    assert paths.bad() == ()


def test_a_failure_that_no_request_met_counts_no_longer_than_the_one_before(clock, paths):
    for _ in range(4):
        paths.failed(A, was_asked=False)
        clock.now_s += FIRST_S
        assert paths.bad() == ()
    paths.failed(A)
    clock.now_s += 2 * FIRST_S - 0.1
    assert paths.bad() == (A,)
