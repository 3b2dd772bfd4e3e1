"""The rate at which a device computes prompts, measured before there are any."""

import time
from collections.abc import Callable

from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.backend import Runner
from engine.cache.block_pool import BlockPool
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence

FIRST_TOKENS, GROWTH, NUM_RUNS = 16, 4, 2
MAX_RUN_S = 0.25
"""A chunk that would take longer, in seconds, is not computed: a worker waits for this as it starts."""
_SAMPLING = SamplingParams(max_tokens=1, seed=0)


def measure_prefill_rate(
    runner: Runner,
    pool: BlockPool,
    max_tokens: int,
    vocab_size: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return how many tokens of a prompt an idle device computes per second.

    It is the best of chunks that grow up to `max_tokens`, each computed twice: the first run of a size may have things
    to prepare.
    """
    max_tokens = pool.groups.limit(pool.groups.nothing(), 0, max_tokens)
    rate, num_tokens = 0.0, min(FIRST_TOKENS, max_tokens)
    while True:
        seconds = min(_run_s(runner, pool, num_tokens, vocab_size, clock) for _ in range(NUM_RUNS))
        rate = max(rate, num_tokens / seconds)
        larger = min(GROWTH * num_tokens, max_tokens)
        if larger == num_tokens or seconds * larger / num_tokens > MAX_RUN_S:
            return rate
        num_tokens = larger


def _run_s(runner: Runner, pool: BlockPool, num_tokens: int, vocab_size: int, clock: Callable[[], float]) -> float:
    """Return how long one chunk takes, in seconds. Its blocks are free again, and nobody finds them."""
    # One token is left over, so the chunk does not reach the newest: nothing is drawn.
    tokens = [index % vocab_size for index in range(num_tokens + 1)]
    sequence = Sequence(RequestId("measurement"), tokens, _SAMPLING)
    sequence.blocks.extend(pool.allocate(-(-num_tokens // pool.block_size)))
    lease = pool.groups.nothing()
    pool.groups.cover(lease, sequence.blocks, 0, 0, num_tokens)
    try:
        start_s = clock()
        runner.forward_without_sampling([ScheduledChunk(sequence, 0, num_tokens)])
        runner.wait()
        return clock() - start_s
    finally:
        pool.groups.end(lease)
        pool.release(sequence.blocks)
