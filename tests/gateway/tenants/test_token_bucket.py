"""A bucket never gives more in any time than its limit allows, and what it says of waiting is true."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tenants.token_bucket import TokenBucket

ASKS = st.lists(st.tuples(st.floats(0, 40), st.integers(0, 50)), max_size=40)


@given(st.integers(1, 60), ASKS)
def test_no_time_sees_more_than_a_full_bucket_and_what_flows_in(per_minute, asks):
    bucket, now, taken = TokenBucket(per_minute), 0.0, []
    for pause_s, amount in asks:
        now += pause_s
        if amount <= per_minute and not bucket.wait_s(amount, now):
            bucket.take(amount, now)
            taken.append((now, amount))
    for index, (begin_s, _) in enumerate(taken):
        for end_s, _ in taken[index:]:
            total = sum(amount for at_s, amount in taken if begin_s <= at_s <= end_s)
            assert total <= per_minute + (end_s - begin_s) * per_minute / 60 + 1e-6


@given(st.integers(1, 60), ASKS, st.integers(1, 200))
def test_after_the_time_that_it_says_there_is_room_and_not_before(per_minute, asks, amount):
    bucket, now = TokenBucket(per_minute), 0.0
    for pause_s, each in asks:
        now += pause_s
        bucket.take(each, now)
    wait_s = bucket.wait_s(amount, now)
    assert bucket.wait_s(amount, now + wait_s + 1e-6) == pytest.approx(0, abs=1e-5)
    assert wait_s < 1e-3 or bucket.wait_s(amount, now + wait_s * 0.99) > 0


def test_another_limit_forgives_nothing():
    bucket = TokenBucket(60)
    bucket.take(50, 0.0)
    bucket.change(100, 0.0)
    assert bucket.wait_s(50, 0.0) == 0 and bucket.wait_s(51, 0.0) > 0
    bucket.change(10, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(41 * 6)
