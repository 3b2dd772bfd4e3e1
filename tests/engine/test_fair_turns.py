"""Turns: in the order of arrival within a tenant, and between tenants that wait by their weights."""

from hypothesis import given
from hypothesis import strategies as st

from engine.fair_turns import MOST_BANDS, MOST_TENANTS, FairTurns, Turn

COSTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=60)
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=50))
def test_one_tenant_alone_is_served_in_the_order_of_arrival(steps):
    turns, waiting, served, given_ = FairTurns(), [], [], []
    for cost, is_served in steps:
        waiting.append(turns.give(0, "a", cost))
        given_.append(waiting[-1])
        if is_served:
            served.append(min(waiting))
            waiting.remove(served[-1])
            turns.begin(0, served[-1])
    assert served + sorted(waiting) == given_


@given(COSTS, COSTS)
def test_while_two_wait_neither_gets_more_than_its_weight_and_one_request(first, later):
    """The bound of the paper: what two get over their weights differs by their longest requests over theirs."""
    turns = FairTurns()
    waiting: dict[Turn, tuple[str, int]] = {}
    got = dict.fromkeys(WEIGHTS, 0.0)

    def come(requests):
        for tenant, cost in requests:
            waiting[turns.give(0, tenant, cost / WEIGHTS[tenant])] = tenant, cost

    def serve():
        turn = min(waiting)
        tenant, cost = waiting.pop(turn)
        turns.begin(0, turn)
        got[tenant] += cost / WEIGHTS[tenant]

    come(first)
    for _ in range(len(first) // 2):
        serve()
    come(later)
    start, both = dict(got), {tenant for tenant, _ in waiting.values()}
    most = 50 * sum(1 / WEIGHTS[tenant] for tenant in both)
    while both <= {tenant for tenant, _ in waiting.values()}:
        serve()
        gains = [got[tenant] - start[tenant] for tenant in both]
        assert max(gains) - min(gains) <= most


def test_who_was_idle_gets_no_more_for_that():
    turns = FairTurns()
    for _ in range(10):
        turns.begin(0, turns.give(0, "a", 10))
    waiting = {turns.give(0, tenant, 10): tenant for tenant in ("b", "a") * 3}
    assert [waiting[turn] for turn in sorted(waiting)] == ["b", "a", "b", "a", "b", "a"]


def test_a_band_that_begins_anew_begins_behind_who_waits_in_it():
    turns = FairTurns()
    turns.begin(0, turns.give(0, "a", 100))
    waiting = turns.give(0, "v", 50), turns.give(0, "v", 50)
    for priority in range(1, MOST_BANDS + 1):
        turns.give(priority, "a", 1)
    assert turns.give(0, "a", 1) > max(waiting)


def test_what_clients_choose_takes_no_more_memory():
    turns = FairTurns()
    for number in range(3 * MOST_TENANTS):
        turns.begin(0, turns.give(0, str(number), 1))
        turns.give(number, "a", 1)
    assert len(turns._bands) == MOST_BANDS
    assert max(len(band.ends) for band in turns._bands.values()) <= MOST_TENANTS + 1
