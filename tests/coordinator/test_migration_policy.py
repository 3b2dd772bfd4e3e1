"""Which answers move, and why: for a drain at once, for memory before answers are preempted, and never to and fro."""

from dataclasses import dataclass
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from contracts.ids import WorkerId
from contracts.node import Node, NodeLoad, WorkerRole
from coordinator.migration_policy import (
    BALANCE_PAUSE_S,
    HOLD_S,
    MEMORY_PAUSE_S,
    MIN_DIFFERENCE,
    MigrationOrder,
    MigrationPolicy,
    MigrationReason,
    is_short,
    short_tokens,
)
from tests.coordinator.coordinator_rig import node

DRAIN, MEMORY, BALANCE = MigrationReason
CAPACITY = 10_000
A, B, C = map(WorkerId, "abc")


def worker(name: str, running: int, free: int, role: WorkerRole = WorkerRole.DECODE, **load: Any) -> Node:
    """A worker of 10 000 tokens of KV that fills them at 100 tokens a second, unless `load` says another rate."""
    facts: dict[str, Any] = {"decode_rate": 100.0} | load
    stated = NodeLoad(num_running=running, free_tokens=free, **facts)
    return Node(info=replace(node(name, role), capacity_tokens=CAPACITY), load=stated, alive=True)


def decided(nodes: list[Node], *reasons: MigrationReason) -> list[MigrationOrder]:
    return MigrationPolicy(reasons).decide(nodes, 100.0)


def test_all_answers_of_a_worker_that_drains_leave_for_any_that_does_not():
    nodes = [worker("a", 3, 9000, draining=True), worker("b", 1, 9000), worker("c", 2, 9000, draining=True)]
    both = frozenset({A, C})
    assert decided(nodes, DRAIN) == [MigrationOrder(name, DRAIN, 1.0, both) for name in (A, C)]
    assert decided(nodes, MEMORY, BALANCE) == []


def test_nothing_moves_from_prefill_workers_nor_to_them():
    nodes = [worker("p", 20, 10, WorkerRole.PREFILL, draining=True), worker("d", 1, 9000)]
    assert decided(nodes, *MigrationReason) == []


@pytest.mark.parametrize(("free", "is_moved"), [(499, True), (500, False)])
def test_a_worker_whose_free_kv_lasts_less_than_five_seconds_is_short(free: int, is_moved: bool):
    orders = decided([worker("a", 10, free), worker("b", 1, 9000)], MEMORY)
    assert [(order.source, order.reason) for order in orders] == ([("a", MEMORY)] if is_moved else [])


def test_as_many_leave_as_make_room_for_twice_that_time():
    (order,) = decided([worker("a", 10, 400), worker("b", 1, 9000)], MEMORY)
    assert order.share == ceil((1000 - 400) / 960) / 10 and order.exclude == {A}


def test_a_small_pool_that_is_filled_fast_is_not_kept_empty():
    nodes = [worker("a", 10, CAPACITY // 8, decode_rate=1e6), worker("b", 0, 0)]
    assert decided(nodes, MEMORY) == []


@pytest.mark.parametrize(
    "other",
    [worker("b", 5, 2500), worker("b", 1, 9000, num_waiting=1), worker("b", 1, 9000, draining=True)],
    ids=["full", "with a queue", "draining"],
)
def test_without_room_elsewhere_nothing_moves_for_memory(other: Node):
    assert decided([worker("a", 10, 10), other], MEMORY) == []


def test_the_only_answer_of_a_worker_stays():
    assert decided([worker("a", 1, 10), worker("b", 0, 0)], MEMORY) == []


def test_a_worker_is_left_alone_until_its_report_shows_the_move():
    policy, nodes = MigrationPolicy([MEMORY]), [worker("a", 10, 400), worker("b", 1, 9000)]
    assert policy.decide(nodes, 100.0)
    assert not policy.decide(nodes, 100.0 + MEMORY_PAUSE_S - 0.1)
    assert policy.decide(nodes, 100.0 + MEMORY_PAUSE_S)


def test_two_that_are_short_do_not_count_on_the_same_room():
    nodes = [worker("a", 10, 0), worker("b", 10, 0), worker("c", 1, 4000)]
    orders = decided(nodes, MEMORY)
    assert sum(order.share * 10 for order in orders) == 1  # 1500 are to spare, an answer has 1000


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, CAPACITY), st.integers(0, 3), st.floats(0, 1e5)),
        min_size=1,
        max_size=5,
    )
)
def test_moves_for_memory_make_no_destination_short_and_take_at_most_half(rows: list[tuple[int, int, int, float]]):
    """The room is that of the workers that are no source's `exclude`; all of them together hold what is moved."""
    nodes = [
        worker(f"w{index}", running, free if running else 0, num_waiting=waiting, decode_rate=rate)
        for index, (running, free, waiting, rate) in enumerate(rows)
    ]
    by_name = {each.info.worker_id: each for each in nodes}
    orders, moved_tokens, targets = decided(nodes, MEMORY), 0.0, set[WorkerId]()
    for order in orders:
        source = by_name[order.source]
        assert is_short(source) and 0 < order.share <= 0.5
        moved_tokens += order.share * (CAPACITY - source.load.free_tokens)
        targets |= by_name.keys() - order.exclude
    assert targets.isdisjoint(order.source for order in orders)
    room = sum(
        (by_name[name].load.free_tokens if by_name[name].load.num_running else CAPACITY)
        - 2 * short_tokens(by_name[name])
        for name in targets
    )
    assert not orders or moved_tokens <= room + 1e-6


@dataclass
class Pool:
    """Workers whose answers move as ordered, in turn to the one with the fewest."""

    counts: dict[WorkerId, int]

    @property
    def nodes(self) -> list[Node]:
        return [worker(name, count, 9000) for name, count in self.counts.items()]

    def move(self, order: MigrationOrder) -> None:
        for _ in range(round(order.share * self.counts[order.source])):
            target = min((n for n in self.counts if n not in order.exclude), key=lambda n: (self.counts[n], n))
            self.counts[order.source] -= 1
            self.counts[target] += 1


def test_a_worker_far_above_another_for_a_while_gives_it_half_of_the_difference():
    pool, policy = Pool({A: 20, B: 2}), MigrationPolicy([BALANCE])
    assert policy.decide(pool.nodes, 100.0) == [] == policy.decide(pool.nodes, 100.0 + HOLD_S - 0.1)
    (order,) = policy.decide(pool.nodes, 100.0 + HOLD_S)
    pool.move(order)
    assert pool.counts == {A: 11, B: 11} and order.reason is BALANCE


@pytest.mark.parametrize("counts", [(9, 2), (7, 0), (30, 16)])
def test_a_worker_not_far_above_keeps_its_answers(counts: tuple[int, int]):
    policy, pool = MigrationPolicy([BALANCE]), Pool(dict(zip((A, B), counts, strict=True)))
    assert not policy.decide(pool.nodes, 0.0) and not policy.decide(pool.nodes, 2 * HOLD_S)


def test_a_difference_that_goes_by_itself_moves_nothing():
    policy, far, near = MigrationPolicy([BALANCE]), Pool({A: 20, B: 2}), Pool({A: 8, B: 4})
    assert not policy.decide(far.nodes, 100.0)
    assert not policy.decide(near.nodes, 100.0 + HOLD_S / 2)
    assert not policy.decide(far.nodes, 100.0 + HOLD_S)


@given(st.lists(st.integers(0, 200), min_size=2, max_size=6))
def test_evening_ends_with_none_far_above_and_no_answer_moves_to_and_fro(numbers: list[int]):
    pool, policy = (
        Pool({WorkerId(f"w{index}"): number for index, number in enumerate(numbers)}),
        MigrationPolicy([BALANCE]),
    )
    spread, now = max(numbers) - min(numbers), 0.0
    for _ in range(40):
        now += BALANCE_PAUSE_S + HOLD_S
        policy.decide(pool.nodes, now - HOLD_S)
        for order in policy.decide(pool.nodes, now):
            pool.move(order)
            assert min(pool.counts.values()) >= min(numbers)
            new_spread = max(pool.counts.values()) - min(pool.counts.values())
            assert new_spread <= spread
            spread = new_spread
    most, fewest = max(pool.counts.values()), min(pool.counts.values())
    assert most < fewest + MIN_DIFFERENCE or most < 2 * fewest
