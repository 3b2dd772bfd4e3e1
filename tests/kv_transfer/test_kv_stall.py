"""How long a sender waits for a peer that takes nothing."""

import pytest

from kv_transfer.transports.stall_limit import StallLimit


def test_a_peer_that_takes_nothing_has_the_whole_time() -> None:
    now = [100.0]
    limit = StallLimit(5.0, lambda: now[0])
    for _ in range(5):
        wait_s = limit.next_wait_s()
        assert wait_s == 1.0
        now[0] += wait_s
    assert limit.next_wait_s() == 0.0


def test_the_time_in_which_this_process_stood_still_is_one_look() -> None:
    now = [100.0]
    limit = StallLimit(5.0, lambda: now[0])
    now[0] += 3600.0
    assert limit.next_wait_s() == 1.0
    now[0] += 0.25
    assert limit.next_wait_s() == 1.0
    now[0] += 10.0
    assert limit.next_wait_s() == 1.0
    now[0] += 1.0
    assert limit.next_wait_s() == 1.0
    now[0] += 1.0
    assert limit.next_wait_s() == pytest.approx(0.75)
    now[0] += 0.75
    assert limit.next_wait_s() == 0.0
