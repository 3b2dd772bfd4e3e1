"""Scheduler: order, budget, preemption; and that every sequence comes to its end under any load."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.ids import RequestId
from engine.cache.block_pool import BlockPool
from engine.scheduler.batch import Batch
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_limits import SchedulerLimits
from engine.sequence import Sequence, Status
from tests.engine.driving import greedy

SIZE = 4


LIMITS = SchedulerLimits(max_num_seqs=4, max_batched_tokens=16, max_mixed_tokens=16)


@dataclass
class FakeEngine:
    """The scheduler's other half without a model: every piece computes, every sample is token 1."""

    num_blocks: int = 32
    limits: SchedulerLimits = LIMITS
    batches: list[Batch] = field(default_factory=list)
    num_finished: int = 0

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, SIZE)
        self.scheduler = Scheduler(self.pool, self.limits)

    def add(
        self,
        length: int,
        max_tokens: int = 4,
        first: int = 100,
        priority: int = 0,
        prompt_logprobs: int | None = None,
        tenant: str = "",
        weight: float = 1.0,
    ) -> Sequence:
        tokens = range(first, first + length)
        sampling = greedy(max_tokens, prompt_logprobs=prompt_logprobs)
        share = {"priority": priority, "tenant": tenant, "cost": length / weight}
        sequence = Sequence(RequestId(f"{first}-{length}"), list(tokens), sampling, **share)  # type: ignore[arg-type]
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        self.batches.append(batch)
        for piece in batch.chunks:
            self._compute(piece.sequence, piece.end)
        self.pool.check()
        return batch

    def _compute(self, sequence: Sequence, end: int) -> None:
        assert len(sequence.blocks) * SIZE >= end
        sequence.num_computed = end
        digests = sequence.extend_digests(SIZE, len(sequence.tokens) // SIZE)
        for index in range(sequence.num_inserted_blocks, end // SIZE):
            tokens = sequence.tokens[index * SIZE : (index + 1) * SIZE]
            self.pool.insert(sequence.blocks[index], digests[index], tokens)
        sequence.num_inserted_blocks = end // SIZE
        if end == len(sequence.tokens):
            sequence.tokens.append(1)
            if sequence.num_generated >= sequence.sampling.max_tokens:
                self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.pool.release(sequence.blocks)
        del sequence.blocks[:]
        self.num_finished += 1


def shape(batch: Batch) -> list[tuple[str, int, int]]:
    return [(piece.sequence.request_id, piece.first_token, piece.num_tokens) for piece in batch.chunks]


def test_a_long_prompt_is_cut_where_the_budget_ends():
    engine = FakeEngine(limits=SchedulerLimits(max_num_seqs=4, max_batched_tokens=15, max_mixed_tokens=15))
    engine.add(38)
    assert [shape(engine.step()) for _ in range(3)] == [[("100-38", 0, 15)], [("100-38", 15, 15)], [("100-38", 30, 8)]]


def test_decodes_run_in_every_step_while_a_prompt_is_prefilled():
    engine = FakeEngine()
    engine.add(3, max_tokens=9)
    engine.step()
    engine.add(40, first=500)
    for _ in range(3):
        assert shape(engine.step())[0][2] == 1
        assert sum(piece.num_tokens for piece in engine.batches[-1].chunks) <= 16


def test_beside_answers_prompts_are_cut_shorter():
    engine = FakeEngine(limits=SchedulerLimits(max_num_seqs=4, max_batched_tokens=16, max_mixed_tokens=6))
    engine.add(3, max_tokens=3)
    engine.step()
    engine.add(38, first=500)
    steps = [shape(engine.step()) for _ in range(4)]
    assert [step[-1] for step in steps] == [("500-38", 0, 5), ("500-38", 5, 5), ("500-38", 10, 16), ("500-38", 26, 12)]
    assert [len(step) for step in steps] == [2, 2, 1, 1]


def test_only_what_is_handed_over_is_cut_at_blocks():
    for handoff, sizes in ((False, [5, 5, 5]), (True, [4, 4, 4])):
        engine = FakeEngine(limits=SchedulerLimits(max_num_seqs=4, max_batched_tokens=16, max_mixed_tokens=6))
        engine.add(3, max_tokens=9)
        engine.step()
        engine.add(38, first=500).handoff = handoff
        assert [engine.step().chunks[-1].num_tokens for _ in sizes] == sizes


def answering(count: int, limits: SchedulerLimits) -> FakeEngine:
    engine = FakeEngine(500, limits)
    for index in range(count):
        engine.add(3, max_tokens=30, first=100 * index)
    for _ in range(10):
        engine.step()
    assert [piece.is_decode for piece in engine.step().chunks] == [True] * count
    return engine


@pytest.mark.parametrize(("mixed", "room"), [(4, SIZE), (20, 15), (24, 19), (6, SIZE)])
def test_beside_any_number_of_answers_there_is_room_for_a_block_of_a_prompt(mixed, room):
    engine = answering(5, SchedulerLimits(max_num_seqs=9, max_batched_tokens=40, max_mixed_tokens=mixed))
    engine.add(38, first=700)
    assert shape(engine.step())[-1] == ("700-38", 0, room)


def test_a_quarter_of_a_step_is_the_prompts_whatever_the_number_of_answers():
    engine = answering(20, SchedulerLimits(max_num_seqs=30, max_batched_tokens=60, max_mixed_tokens=24))
    engine.add(38, first=7000)
    assert shape(engine.step())[-1] == ("7000-38", 0, 6)


def test_what_is_handed_over_takes_no_blocks_while_there_is_no_room_for_one_of_it(monkeypatch):
    engine = FakeEngine(limits=SchedulerLimits(max_num_seqs=4, max_batched_tokens=18, max_mixed_tokens=18))
    engine.add(15)
    engine.add(40, first=500).handoff = True
    looked, find = [], engine.pool.find
    monkeypatch.setattr(engine.pool, "find", lambda *asked: looked.append(1) or find(*asked))
    assert shape(engine.step()) == [("100-15", 0, 15)] and len(looked) == 1
    assert shape(engine.step())[-1] == ("500-40", 0, 16)


def test_an_answer_that_is_expected_counts_as_one_that_runs():
    engine = FakeEngine(limits=SchedulerLimits(max_num_seqs=4, max_batched_tokens=16, max_mixed_tokens=8))
    engine.add(38)
    assert shape(engine.scheduler.schedule(num_reserved=1)) == [("100-38", 0, 8)]


def test_no_more_run_at_once_than_there_are_places():
    engine = FakeEngine()
    for index in range(6):
        sequence = Sequence(RequestId(str(index)), [index] * 5, greedy(3))
        sequence.blocks.extend(engine.pool.allocate(2))
        sequence.num_computed = 5
        sequence.tokens.append(1)
        engine.scheduler.resume(sequence)
    while engine.scheduler.has_work:
        assert len(engine.step().chunks) <= 4
    assert engine.num_finished == 6


def test_a_reserved_place_is_given_to_nobody():
    engine = FakeEngine()
    for index in range(4):
        engine.add(5, first=100 * index)
    assert len(engine.scheduler.schedule(num_reserved=1).chunks) == 3


def recomputed(engine: FakeEngine, name: int, num_prompt: int, length: int, num_computed: int) -> Sequence:
    """An answer that had given its blocks back, and has come so far again."""
    sequence = Sequence(RequestId(str(name)), [name] * num_prompt, greedy(30))
    sequence.tokens.extend([1] * (length - num_prompt))
    sequence.blocks.extend(engine.pool.allocate(-(-length // SIZE)))
    sequence.num_computed = num_computed
    engine.scheduler.resume(sequence)
    return sequence


def test_prompts_are_cut_shorter_beside_an_answer_that_is_computed_again():
    limits = SchedulerLimits(max_num_seqs=4, max_batched_tokens=16, max_mixed_tokens=6)
    for length, left in ((15, 3), (13, 5), (19, 0)):
        engine = FakeEngine(limits=limits)
        recomputed(engine, 1, num_prompt=9, length=length, num_computed=12)
        engine.add(38, first=500)
        assert shape(engine.step()) == [("1", 12, length - 12), ("500-38", 0, left)][: 1 + bool(left)]


def test_an_answer_that_is_computed_again_waits_for_longer_prompts_that_are_more_urgent():
    limits = SchedulerLimits(max_num_seqs=4, max_batched_tokens=16, max_mixed_tokens=6)
    engine = FakeEngine(limits=limits)
    engine.add(9, first=500, max_tokens=1)
    engine.add(9, first=700, max_tokens=1)
    assert shape(engine.scheduler.schedule()) == [("500-9", 0, 9), ("700-9", 0, 7)]
    recomputed(engine, 1, num_prompt=9, length=14, num_computed=12)
    assert shape(engine.scheduler.schedule()) == [("500-9", 0, 9), ("700-9", 0, 7)]


def test_what_waits_for_longer_prompts_holds_no_blocks_meanwhile():
    engine = FakeEngine(limits=SchedulerLimits(max_num_seqs=4, max_batched_tokens=16, max_mixed_tokens=6))
    engine.add(9, max_tokens=5)
    while engine.num_finished == 0:
        engine.step()
    engine.add(9, first=500, max_tokens=1)
    again = Sequence(RequestId("2"), range(100, 109), greedy(30))
    again.tokens.extend([1] * 4)
    engine.scheduler.add(again)
    assert shape(engine.scheduler.schedule()) == [("500-9", 0, 9)]
    assert engine.scheduler.waiting == [again] and not again.blocks and engine.pool.num_held == 3


def test_an_answer_that_lacks_one_token_goes_among_the_decodes():
    """Before those that lack several, though these came first: a runner knows decodes by how many they are."""
    engine = FakeEngine()
    engine.add(9, max_tokens=5)
    while engine.num_finished == 0:
        engine.step()
    recomputed(engine, 1, num_prompt=9, length=14, num_computed=12)
    again = Sequence(RequestId("2"), range(100, 109), greedy(30))
    again.tokens.extend([1] * 4)
    engine.scheduler.add(again)
    engine.add(5, first=500)
    assert shape(engine.scheduler.schedule()) == [("2", 12, 1), ("1", 12, 2), ("500-5", 0, 5)]


def test_what_found_no_room_looks_again_when_there_may_be_more(monkeypatch):
    engine = FakeEngine(num_blocks=8)
    looked, find = [], engine.pool.find
    monkeypatch.setattr(engine.pool, "find", lambda *asked: looked.append(1) or find(*asked))
    first = engine.add(12, max_tokens=3)
    engine.step()
    late = engine.add(24, first=500)
    looked.clear()
    assert [shape(engine.step()), engine.scheduler.waiting, len(looked)] == [[("100-12", 12, 1)], [late], 1]
    engine.scheduler.schedule()
    assert engine.scheduler.waiting == [late] and len(looked) == 1
    engine.finish(first)
    assert shape(engine.step()) == [("500-24", 0, 16)] and len(looked) == 2


def test_what_found_no_room_looks_again_when_one_that_keeps_its_blocks_runs_no_more():
    """It is held for its handoff: it does not grow, so nothing is left to it."""
    engine = FakeEngine(num_blocks=8)
    held = engine.add(12)
    engine.step()
    late = engine.add(16, first=500)
    engine.scheduler.schedule()
    assert engine.scheduler.waiting == [late] and engine.pool.num_available == 4
    engine.scheduler.remove(held)
    assert shape(engine.step()) == [("500-16", 0, 16)]


def test_what_found_no_room_looks_again_when_one_that_does_not_run_gives_its_blocks_back():
    engine = FakeEngine(num_blocks=8)
    held = engine.add(12)
    engine.step()
    engine.scheduler.remove(held)
    late = engine.add(24, first=500)
    assert engine.step().chunks == () and engine.scheduler.waiting == [late]
    engine.pool.release(held.blocks)
    assert shape(engine.step()) == [("500-24", 0, 16)]


def test_arrival_order_is_served_and_slots_are_bounded():
    engine = FakeEngine()
    for first in range(0, 600, 100):
        engine.add(2, first=first)
    assert [name for name, _, _ in shape(engine.step())] == ["0-2", "100-2", "200-2", "300-2"]


def test_the_lowest_priority_is_served_first_and_equals_in_order_of_arrival():
    engine = FakeEngine(limits=SchedulerLimits(max_num_seqs=1, max_batched_tokens=16, max_mixed_tokens=16))
    for first, priority in ((100, 5), (200, 0), (300, -(2**63)), (400, 5), (500, 0), (600, 2**63 - 1)):
        engine.add(2, max_tokens=1, first=first, priority=priority)
    assert [shape(engine.step())[0][0] for _ in range(6)] == ["300-2", "200-2", "500-2", "100-2", "400-2", "600-2"]


def test_a_flood_of_one_tenant_waits_behind_anothers_few():
    engine = FakeEngine(limits=SchedulerLimits(max_num_seqs=1, max_batched_tokens=16, max_mixed_tokens=16))
    for number in range(6):
        engine.add(4, max_tokens=1, first=1000 + 10 * number, tenant="loud")
    engine.step()
    for number in range(2):
        engine.add(4, max_tokens=1, first=2000 + 10 * number, tenant="quiet")
    engine.add(4, max_tokens=1, first=3000, tenant="loud", priority=-1)
    names = [shape(engine.step())[0][0].split("-")[0] for _ in range(8)]
    assert names == ["3000", "2000", "1010", "2010", "1020", "1030", "1040", "1050"]


def test_a_prompt_whose_turn_is_before_one_that_is_computed_does_not_wait_for_the_rest_of_it():
    engine = FakeEngine(num_blocks=64)
    engine.add(60, max_tokens=1, first=1000, tenant="loud")
    engine.add(8, max_tokens=1, first=2000, tenant="loud")
    assert shape(engine.step()) == [("1000-60", 0, 16)]
    engine.add(20, max_tokens=1, first=3000, tenant="quiet")
    assert shape(engine.step()) == [("3000-20", 0, 16)]
    assert shape(engine.step()) == [("1000-60", 16, 16)]  # of both 16 were computed, and it came before
    engine.add(4, max_tokens=1, first=4000, priority=-1)
    assert shape(engine.step()) == [("4000-4", 0, 4), ("3000-20", 16, 4), ("1000-60", 32, 8)]
    assert [shape(engine.step()) for _ in range(2)] == [[("1000-60", 40, 16)], [("1000-60", 56, 4), ("2000-8", 0, 8)]]


def test_what_a_tenant_takes_back_costs_it_nothing():
    engine = FakeEngine(limits=SchedulerLimits(max_num_seqs=1, max_batched_tokens=16, max_mixed_tokens=16))
    taken_back = [engine.add(8, max_tokens=1, first=1000 + 10 * number, tenant="a") for number in range(5)]
    for sequence in taken_back:
        engine.scheduler.remove(sequence)
    for number in range(2):
        engine.add(4, max_tokens=1, first=2000 + 10 * number, tenant="b")
        engine.add(4, max_tokens=1, first=3000 + 10 * number, tenant="a")
    assert [shape(engine.step())[0][0] for _ in range(4)] == ["2000-4", "3000-4", "2010-4", "3010-4"]


def test_an_urgent_newcomer_overtakes_who_waits_and_nobody_who_runs():
    engine = FakeEngine(limits=SchedulerLimits(max_num_seqs=2, max_batched_tokens=16, max_mixed_tokens=16))
    for first in (100, 200, 300):
        engine.add(2, max_tokens=3, first=first)
    engine.step()
    engine.add(2, max_tokens=3, first=400, priority=-1)
    while engine.num_finished < 4:
        engine.step()
    started = [sequence.request_id for batch in engine.batches for sequence in batch.started]
    assert started == ["100-2", "200-2", "400-2", "300-2"]


def test_the_least_urgent_gives_way_though_it_is_the_oldest():
    engine = FakeEngine(num_blocks=7)
    old, young = engine.add(11, max_tokens=12, priority=1), engine.add(11, max_tokens=12, first=500)
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert old.status is Status.WAITING and young.status is Status.RUNNING
    assert engine.scheduler.has_preempted_before((9, (0.0, 9)))
    while engine.scheduler.has_work:
        engine.step()
    assert engine.num_finished == 2 and len(old.tokens) == 23


def test_a_prompt_that_is_scored_is_computed_whole():
    engine = FakeEngine()
    for prompt_logprobs in (None, 0):
        engine.add(12, max_tokens=1, prompt_logprobs=prompt_logprobs)
        assert shape(engine.step()) == [("100-12", 0, 12)]


def test_a_prefix_hit_skips_full_blocks_but_never_the_last_token():
    engine = FakeEngine()
    engine.add(8, max_tokens=1)
    engine.step()
    engine.add(8, max_tokens=1)
    assert shape(engine.step()) == [("100-8", 4, 4)]
    assert engine.scheduler.num_prefix_hits == 4


def test_a_prefix_that_is_found_is_not_evicted_to_make_room_for_the_rest():
    """Though it is the one that was used least recently: a block of it would hold two places of one sequence."""
    engine = FakeEngine(num_blocks=4)
    for length, first in ((9, 100), (5, 500)):
        engine.add(length, max_tokens=1, first=first)
        engine.step()
    longer = engine.add(13, first=100)
    assert shape(engine.step()) == [("100-13", 8, 5)]
    assert len(set(longer.blocks)) == 4


def test_the_youngest_gives_way_and_the_oldest_never_waits():
    engine = FakeEngine(num_blocks=7)
    old, young = engine.add(11, max_tokens=12), engine.add(11, max_tokens=12, first=500)
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert old.status is Status.RUNNING and young.status is Status.WAITING
    while engine.scheduler.has_work:
        engine.step()
    assert engine.num_finished == 2 and len(young.tokens) == 23


def test_blocks_that_come_again_are_another_array():
    """A runner knows by the array, and its length, whether the device has the table already."""
    engine = FakeEngine(num_blocks=7)
    engine.add(11, max_tokens=12)
    young = engine.add(11, max_tokens=12, first=500)
    engine.step()
    held = young.blocks
    engine.step()
    assert young.blocks is held
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert young.blocks is not held and not young.blocks


def test_announced_sequences_are_never_preempted():
    engine = FakeEngine(num_blocks=7)
    old, young = engine.add(11, max_tokens=20), engine.add(11, max_tokens=20, first=500)
    young.handoff, young.num_announced = True, 4
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert old.status is Status.WAITING and young.status is Status.RUNNING


def test_recomputed_tokens_of_prompt_and_answer_are_separate_pieces():
    engine = FakeEngine(num_blocks=7)
    engine.add(11, max_tokens=12)
    young = engine.add(10, max_tokens=12, first=500)
    while engine.num_finished < 2:
        engine.step()
    pieces = [piece for batch in engine.batches for piece in batch.chunks if piece.sequence is young]
    assert all(piece.end <= 10 or piece.first_token >= 10 for piece in pieces)


REQUEST = st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 3), st.integers(-2, 2))
requests = st.lists(REQUEST, min_size=1, max_size=12)


@settings(max_examples=150)
@given(
    requests=requests,
    num_blocks=st.integers(13, 40),
    budget=st.integers(4, 40),
    mixed=st.integers(4, 40),
    arrivals=st.randoms(),
)
def test_every_sequence_ends_within_the_limits(requests, num_blocks, budget, mixed, arrivals):
    limits = SchedulerLimits(max_num_seqs=4, max_batched_tokens=budget, max_mixed_tokens=mixed)
    engine = FakeEngine(num_blocks, limits)
    todo = list(requests)
    for _ in range(3000):
        if todo and arrivals.random() < 0.5:
            length, max_tokens, family, priority = todo.pop()
            engine.add(length, max_tokens, first=1000 * family, priority=priority)
        batch = engine.step()
        names = [id(piece.sequence) for piece in batch.chunks]
        assert len(names) == len(set(names)) <= 4
        phases = [(not piece.is_answer, not piece.is_decode) for piece in batch.chunks]
        assert phases == sorted(phases)
        assert sum(piece.num_tokens for piece in batch.chunks) <= budget
        if any(piece.is_answer for piece in batch.chunks):
            assert sum(piece.num_tokens for piece in batch.chunks if not piece.is_answer) <= max(mixed, SIZE)
        if num_decodes := sum(piece.is_decode for piece in batch.chunks):
            assert sum(piece.num_tokens for piece in batch.chunks) <= max(mixed, num_decodes + max(SIZE, mixed // 4))
        if not todo and not engine.scheduler.has_work:
            break
    assert engine.num_finished == len(requests)
    assert engine.pool.num_held == 0
