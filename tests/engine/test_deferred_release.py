"""Blocks that were let go while a batch may still write to them."""

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.block_pool import BlockPool
from engine.cache.deferred_release import DeferredRelease

NUM_BLOCKS = 12
MOVES = st.lists(st.sampled_from(["launch", "complete", "release"]), max_size=40)


@given(MOVES)
def test_a_block_is_free_when_all_batches_that_were_launched_before_it_was_let_go_are_done(moves):
    pool = BlockPool(NUM_BLOCKS, 16)
    held = pool.allocate(NUM_BLOCKS)
    deferred = DeferredRelease(pool)
    num_launched = num_completed = 0
    due: dict[int, int] = {}  # block -> the batch after which it is free
    for move in moves:
        if move == "launch":
            deferred.on_launched()
            num_launched += 1
        elif move == "complete" and num_completed < num_launched:
            deferred.on_completed()
            num_completed += 1
        elif move == "release" and held:
            block = held.pop()
            deferred.release([block])
            due[block] = num_launched
        waiting = {block for block, batch in due.items() if batch > num_completed}
        assert {block for block in range(NUM_BLOCKS) if pool.holds(block)} == {*held, *waiting}
        assert set(deferred.holds()) == waiting
        assert deferred.num_in_flight == num_launched - num_completed
        pool.check()
