"""The rate of prompts that is measured before there are any, on each device."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cache.block_pool import BlockPool
from engine.engine import Engine
from engine.prefill_measurement import MAX_RUN_S, NUM_RUNS, measure_prefill_rate
from engine.scheduler.batch import ScheduledChunk
from tests.engine.driving import answers, greedy, random_prompts
from tests.engine.tiny_models import VOCAB

PROMPTS = random_prompts(VOCAB, (40, 7))


class TimedRunner:
    """A runner that takes `fixed_s` for a chunk and `token_s` for each token, the first time of a size ten times it."""

    def __init__(self, fixed_s: float, token_s: float) -> None:
        self.now, self.sizes = 0.0, []
        self._fixed_s, self._token_s = fixed_s, token_s

    def forward_without_sampling(self, pieces: Sequence[ScheduledChunk]) -> None:
        (piece,) = pieces
        assert not piece.samples and len(piece.sequence.blocks) == -(-piece.num_tokens // 16)
        times = 1 if piece.num_tokens in self.sizes else 10
        self.sizes.append(piece.num_tokens)
        self.now += times * (self._fixed_s + piece.num_tokens * self._token_s)

    def wait(self) -> None:
        """All is computed."""


def measured(runner: TimedRunner, pool: BlockPool, max_tokens: int = 2048) -> float:
    timed: Any = runner
    return measure_prefill_rate(timed, pool, max_tokens, 10, lambda: runner.now)


def each(*sizes: int) -> list[int]:
    return [size for size in sizes for _ in range(NUM_RUNS)]


def test_chunks_grow_to_the_largest_and_the_best_counts():
    runner, pool = TimedRunner(0.005, 1e-5), BlockPool(128, 16)
    assert measured(runner, pool) == pytest.approx(2048 / (0.005 + 2048e-5))
    assert runner.sizes == each(16, 64, 256, 1024, 2048)
    pool.check()
    assert pool.num_available == pool.num_blocks and not pool.num_cached


def test_no_chunk_is_computed_that_a_start_would_wait_for():
    token_s = MAX_RUN_S / 256
    runner = TimedRunner(0.0, token_s * 1.01)
    assert measured(runner, BlockPool(128, 16)) == pytest.approx(1 / token_s / 1.01)
    assert runner.sizes == each(16, 64)
    slow = TimedRunner(0.0, 10.0)
    assert measured(slow, BlockPool(128, 16)) == pytest.approx(0.1) and slow.sizes == each(16)


def test_a_small_cache_bounds_the_chunks():
    runner = TimedRunner(0.0, 1e-5)
    assert measured(runner, BlockPool(1, 16), 12) == pytest.approx(1e5) and runner.sizes == each(12)


def test_a_device_that_can_not_compute_gives_the_blocks_back():
    def fail(_: object) -> None:
        raise RuntimeError("no device")

    broken: Any = SimpleNamespace(forward_without_sampling=fail)
    pool = BlockPool(4, 16)
    with pytest.raises(RuntimeError, match="no device"):
        measure_prefill_rate(broken, pool, 64, 10)
    assert pool.num_available == 4


def test_an_engine_answers_as_if_nothing_was_measured(make: Callable[..., Engine]):
    expected = answers(make(), PROMPTS, greedy())
    engine = make()
    assert engine.measure_prefill_rate() > 0
    engine.check()
    stats = engine.stats()
    assert stats.free_tokens == engine.capacity_tokens and not stats.num_cached_blocks and not stats.num_steps
    assert answers(engine, PROMPTS, greedy()) == expected
