"""What a draft model has read of a sequence's blocks is a run up to its newest token, wherever the blocks come from."""

import numpy as np
import pytest

from engine.speculative.draft_presence import DraftPresence

BLOCKS = [5, 2, 7]


def test_a_run_begins_behind_the_last_token_that_was_not_read() -> None:
    presence = DraftPresence(np.zeros(8, np.int32), 4)
    assert presence.run_start(BLOCKS, 9) == 9
    presence.add(BLOCKS, 0, 9)
    assert presence.run_start(BLOCKS, 9) == 0
    presence.forget([2])
    presence.add(BLOCKS, 6, 9)
    assert [presence.run_start(BLOCKS, end) for end in (4, 6, 7, 9)] == [0, 6, 6, 6]


def test_what_moves_with_a_block_tells_another_worker() -> None:
    here, there = np.zeros(8, np.int32), np.zeros(8, np.int32)
    presence, other = DraftPresence(here, 4), DraftPresence(there, 4)
    presence.add(BLOCKS, 2, 9)
    there[[1, 0, 3]] = here[BLOCKS]
    assert other.run_start([1, 0, 3], 9) == presence.run_start(BLOCKS, 9) == 2


@pytest.mark.parametrize("value", [-1, 5, 1 << 30])
def test_a_value_that_no_worker_writes_leads_to_no_slot_out_of_bounds(value: int) -> None:
    first = np.zeros(8, np.int32)
    presence = DraftPresence(first, 4)
    presence.add(BLOCKS, 0, 12)
    first[2] = value
    assert 0 <= presence.run_start(BLOCKS, 12) <= 8
