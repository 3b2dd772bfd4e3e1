"""The size of prompts' chunks beside answers: by the steps' times, the gap asked for, the answers, and who waits."""

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.batch import prompt_tokens_per_mixed_step
from engine.scheduler.mixed_budget import HEADROOM, MAX_DRAIN_S, MIN_SPEED, MixedBudget
from engine.scheduler.step_time_model import StepTimeModel

ROWS = tuple(range(64, 2049, 64))
MOST, BLOCK = 1024, 64
OBJECTIVE_S = 0.012


def h200_s(num_prompt: int, num_answers: int) -> float:
    """About what bench/results/2026-11-26-engine-gpu-mixed-ending-h200.md has of a step, in seconds."""
    rows = math.ceil((num_prompt + num_answers) / 64) * 64 - num_answers
    return (2.3 + 0.028 * num_answers + (0.8 + 0.0125 * rows if num_prompt else 0.0)) / 1e3


def budget(objective_s: float = OBJECTIVE_S, most: int = MOST, rows: tuple[int, ...] = ROWS) -> MixedBudget:
    return MixedBudget(most, BLOCK, rows, objective_s)


def run(
    sizes: MixedBudget, num_answers: int, num_steps: int = 100, device: Callable[[int, int], float] = h200_s
) -> list[int]:
    """Steps with a prompt that never ends, each behind one without; returns the tokens of prompts in them."""
    found = []
    for _ in range(num_steps):
        sizes.record(0, num_answers, device(0, num_answers))
        found.append(sizes.prompt_tokens(num_answers, 0))
        sizes.record(found[-1], num_answers, device(found[-1], num_answers))
    return found


def test_without_an_objective_a_step_has_all_of_its_budget():
    sizes = budget(objective_s=0.0)
    assert run(sizes, 4) == [prompt_tokens_per_mixed_step(MOST, 4)] * 100
    assert budget().has_objective and not sizes.has_objective


@pytest.mark.parametrize("num_answers", [1, 4, 30])
def test_a_step_fills_the_largest_size_that_keeps_to_the_objective(num_answers):
    size = run(budget(), num_answers)[-1]
    assert (size + num_answers) % 64 == 0
    assert h200_s(size, num_answers) <= HEADROOM * OBJECTIVE_S < h200_s(size + 64, num_answers)


@pytest.mark.parametrize("objective_s", [0.001, 0.006])
def test_an_objective_that_no_step_keeps_to_costs_prompts_a_fifth_of_their_pace(objective_s):
    def floored(num_prompt: int, num_answers: int) -> float:
        return max(h200_s(num_prompt, num_answers), 0.0065 if num_prompt else 0.0)

    size = run(budget(objective_s), 4, device=floored)[-1]
    least = MIN_SPEED * 1020 / floored(1020, 4)
    assert (size - 64) / floored(size - 64, 4) < least <= size / floored(size, 4)


def test_many_answers_make_chunks_small():
    sizes = [run(budget(), num_answers)[-1] for num_answers in (1, 16, 32)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_chunks_grow_while_prompts_wait_longer_than_they_should():
    sizes = budget()
    small = run(sizes, 4)[-1]
    in_time = int(MAX_DRAIN_S * small / h200_s(small, 4))
    found = [sizes.prompt_tokens(4, num_waiting) for num_waiting in (0, in_time // 2, 2 * in_time, 100 * in_time)]
    assert found[:2] == [small, small] and small < found[2] <= found[3] == prompt_tokens_per_mixed_step(MOST, 4)
    assert sizes.prompt_tokens(4, 0) == small


def test_the_first_chunk_is_a_quarter_of_the_budget():
    assert budget().prompt_tokens(4, 0) == 252


def test_steps_in_which_the_host_stood_still_change_nothing():
    random, sizes = Random(0), budget()
    settled = run(sizes, 4)[-1]

    def stalls(num_prompt: int, num_answers: int) -> float:
        return h200_s(num_prompt, num_answers) + (0.05 if random.random() < 0.1 else 0.0)

    assert set(run(sizes, 4, 300, stalls)) == {settled}


def test_a_first_step_that_stood_still_is_soon_outweighed():
    sizes = budget()
    sizes.record(0, 4, h200_s(0, 4))
    sizes.record(252, 4, 0.05)
    assert run(sizes, 4, 300)[-1] == run(budget(), 4)[-1]


def test_a_device_that_gets_slower_or_faster_is_followed():
    sizes = budget()
    fast = run(sizes, 4)[-1]
    slow = run(sizes, 4, 200, lambda *step: 2 * h200_s(*step))[-1]
    assert slow < fast
    assert run(sizes, 4, 400)[-1] == fast


def test_sizes_that_the_device_does_not_hold_are_not_asked_for():
    assert run(budget(rows=(64, 128, 512, 2048)), 4)[-1] == 508


def test_without_captured_sizes_chunks_are_cut_by_blocks():
    assert run(budget(rows=()), 4)[-1] % BLOCK == 0


@given(
    objective_s=st.sampled_from([0.0, 0.001, 0.008, 0.1, 10.0]),
    most=st.integers(1, 4096),
    rows=st.sampled_from([(), ROWS, (64, 256), (8192,)]),
    steps=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 300), st.floats(0.0, 100.0)), max_size=40),
    num_answers=st.integers(0, 5000),
    num_waiting=st.integers(0, 10**7),
)
def test_whatever_was_seen_there_is_room_for_a_block_and_no_more_than_the_budget(
    objective_s, most, rows, steps, num_answers, num_waiting
):
    sizes = budget(objective_s, most, rows)
    for step in steps:
        sizes.record(*step)
    ceiling = max(prompt_tokens_per_mixed_step(most, num_answers), BLOCK)
    assert BLOCK <= sizes.prompt_tokens(num_answers, num_waiting) <= ceiling


@given(st.lists(st.tuples(st.integers(0, 2048), st.integers(1, 256), st.floats(1e-5, 10.0)), min_size=1, max_size=60))
def test_more_rows_or_answers_are_never_foretold_to_be_quicker(steps):
    times = StepTimeModel()
    for step in steps:
        times.record(step[0], step[1], 0.0, step[2])
    found = [times.step_s(rows, 8) for rows in (0, 64, 256, 1024, 4096)]
    assert found == sorted(found) and found[0] >= 0.0
    answers = [times.step_s(256, count) for count in (1, 8, 64, 256)]
    assert answers == sorted(answers)
