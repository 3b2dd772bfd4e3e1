"""The decision what is loaded and what is computed: by the sum of times, never by hope."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.load_plan import (
    MAX_BATCH,
    MAX_DELAY_SHARE,
    LoadBudget,
    LoadPart,
    TierOffer,
    TierRate,
    compute_seconds,
    plan_load,
)

RATE = 1000.0
"""Tokens computed per second: a block of 16 takes 16 ms."""


def test_loads_each_block_from_the_fastest_tier_that_holds_it():
    offers = [TierOffer("disk", 10, 0.001, 0.002), TierOffer("host", 4, 0.0, 0.0001), TierOffer("store", 10, 0.0, 0.01)]
    plan = plan_load(offers, 0, 16, RATE)
    assert plan.parts == (LoadPart("host", 0, 4), LoadPart("disk", 4, 10))
    assert plan.num_blocks == 10
    assert abs(plan.load_s - (4 * 0.0001 + 0.001 + 6 * 0.002)) < 1e-12
    assert plan.compute_s == compute_seconds(0, 160, RATE)


def test_computes_what_a_slow_tier_would_take_longer_for():
    offers = [TierOffer("host", 4, 0.0, 0.0001), TierOffer("store", 10, 0.0, 0.05)]
    assert plan_load(offers, 0, 16, RATE).parts == (LoadPart("host", 0, 4),)
    assert plan_load(offers[1:], 0, 16, RATE).parts == ()
    assert plan_load([], 0, 16, RATE).num_blocks == 0


def test_a_short_prefix_does_not_pay_a_long_latency():
    assert not plan_load([TierOffer("store", 1, 0.05, 0.0001)], 0, 16, RATE).parts
    assert plan_load([TierOffer("store", 8, 0.05, 0.0001)], 0, 16, RATE).parts


OFFERS = st.lists(
    st.builds(TierOffer, st.sampled_from("abc"), st.integers(0, 40), st.floats(0, 0.5), st.floats(1e-6, 0.1)),
    max_size=4,
)


@given(OFFERS, st.integers(0, 8000))
def test_a_plan_is_a_prefix_without_gaps_that_saves_time(offers: list[TierOffer], first_token: int):
    plan = plan_load(offers, first_token, 16, RATE)
    ends = [0, *(part.last for part in plan.parts)]
    assert [part.first for part in plan.parts] == ends[:-1] and ends == sorted(set(ends))
    if plan.parts:
        assert plan.load_s < plan.compute_s == compute_seconds(first_token, plan.num_blocks * 16, RATE)
        assert plan.num_blocks <= max(offer.num_held for offer in offers)


def test_later_tokens_are_dearer():
    assert compute_seconds(8192, 16, RATE) > compute_seconds(0, 16, RATE)


def test_a_tier_is_tried_again_after_a_bad_spell():
    rate = TierRate(1e9, 0.0)
    for _ in range(30):
        rate.add(1 << 20, 1.0)
    assert rate.nbytes_per_s < 2e6
    for _ in range(500):
        rate.passed_over()
    assert rate.nbytes_per_s == 1e9


@given(st.integers(0, 4000), st.integers(1, 4000), st.floats(1.0, 1e5), st.data())
def test_loading_and_computing_the_rest_take_a_tenth_longer_than_computing_at_most(
    first_token: int, num_new: int, rate: float, data: st.DataObject
):
    """Whenever a load is given up: at its limit, with any number of blocks."""
    budget = LoadBudget(first_token, first_token + num_new, 16, rate)
    num_loaded = data.draw(st.integers(0, num_new // 16))
    whole_s = compute_seconds(first_token, num_new, rate)
    rest_s = compute_seconds(first_token + num_loaded * 16, num_new - num_loaded * 16, rate)
    assert budget.limit_s(num_loaded) + rest_s <= (1 + MAX_DELAY_SHARE) * whole_s * (1 + 1e-9)


@given(st.integers(0, 4000), st.integers(1, 4000), st.floats(1.0, 1e5), st.floats(0.0, 2 * MAX_DELAY_SHARE), st.data())
def test_what_a_prompt_has_waited_for_a_peer_is_of_the_same_tenth(
    first_token: int, num_new: int, rate: float, late: float, data: st.DataObject
):
    whole_s = compute_seconds(first_token, num_new, rate)
    budget = LoadBudget(first_token, first_token + num_new, 16, rate, late_s=late * whole_s)
    num_loaded = data.draw(st.integers(0, num_new // 16))
    rest_s = compute_seconds(first_token + num_loaded * 16, num_new - num_loaded * 16, rate)
    total_s = budget.late_s + budget.limit_s(num_loaded) + rest_s
    assert total_s <= (1 + max(late, MAX_DELAY_SHARE)) * whole_s * (1 + 1e-9)
    assert (budget.slack_s > 0) == (late < MAX_DELAY_SHARE) or late == pytest.approx(MAX_DELAY_SHARE)


def test_blocks_that_a_peer_would_send_are_loaded_where_its_link_is_slower():
    """Wherever they are in the prompt: a link takes as long for a late token as for an early one."""
    for first_token in (0, 16_000):
        budget = LoadBudget(first_token, first_token + 320, 16, RATE, math.inf)
        assert budget.plan([TierOffer("disk", 20, 0.0, 0.99 * 16 / RATE)], first_token).num_blocks == 20
        assert not budget.plan([TierOffer("disk", 20, 0.0, 1.01 * 16 / RATE)], first_token).parts
        assert budget.limit_s(5) == pytest.approx((5 * 16 + MAX_DELAY_SHARE * 320) / RATE)


@given(st.floats(1e-7, 10.0), st.integers(16, 4000))
def test_a_batch_takes_half_the_slack_or_is_one_block(block_s: float, num_tokens: int):
    budget = LoadBudget(0, num_tokens, 16, RATE)
    size = budget.blocks_per_batch(block_s)
    assert 1 <= size <= MAX_BATCH
    assert size == 1 or size * block_s <= budget.slack_s / 2


def test_a_tier_whose_answers_became_late_is_asked_again_after_a_while():
    rate = TierRate(1e9, 0.002)
    for _ in range(5):
        rate.add_lookup(0.5)
    assert rate.latency_s > 0.3
    for _ in range(500):
        rate.passed_over()
    assert rate.latency_s == 0.002
