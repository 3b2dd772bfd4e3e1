"""What the host knows of a head on a GPU: which features are kept, and where."""

import pytest
import torch

from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.cuda.eagle3_drafter import DeviceEagle3Drafter
from engine.cuda.inputs.head_inputs import HeadBatch, HeadState
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence

SIZE, MAX_ROWS, NUM_BLOCKS = 4, 16, 32
MAX_NUM_SEQS = 2
NUM_PLACES = 2 * MAX_NUM_SEQS


@pytest.fixture
def state() -> HeadState:
    return HeadState(
        MAX_ROWS, max_step_rows=8, max_drafting=MAX_NUM_SEQS, max_places=3, num_kept=NUM_PLACES, num_blocks=NUM_BLOCKS,
        width=8, dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


@pytest.fixture
def drafter(state: HeadState) -> DeviceEagle3Drafter:
    return DeviceEagle3Drafter(state, SIZE)


def sequence_in(*blocks: int) -> Sequence:
    """Return a prompt that fills these blocks."""
    made = Sequence(RequestId(str(blocks)), range(SIZE * len(blocks)), SamplingParams(max_tokens=50, seed=0))
    made.blocks.extend(blocks)
    return made


def compute(drafter: DeviceEagle3Drafter, *pieces: tuple[Sequence, int, int]) -> HeadBatch:
    """Return what the head does for a batch of these chunks, which are computed then."""
    batch = drafter.batch([ScheduledChunk(*piece) for piece in pieces])
    for sequence, first, count in pieces:
        sequence.num_computed = first + count
    return batch


def test_a_batch_takes_no_place_from_a_sequence_of_its_own(drafter: DeviceEagle3Drafter):
    """It has sat out some steps, and another one's prompt goes on behind a block of somebody else's."""
    waiting, idle, other, source, behind = (sequence_in(*blocks) for blocks in ((0, 1), (2, 3), (4, 5), (6, 7), (6, 8)))
    for sequence, count in ((waiting, 3), (idle, 3), (other, 3), (source, SIZE)):
        compute(drafter, (sequence, 0, count))
    batch = compute(drafter, (waiting, 3, 1), (behind, SIZE, 2))
    assert batch.loaded[0].tolist() == [6]
    assert batch.reads.before[0] >= MAX_ROWS and batch.reads.slots[0] == 3
    assert batch.reads.before[0] not in batch.loaded[1]
    assert len({batch.reads.before[0], *batch.loaded[1], *batch.kept[1]}) == 3


def test_two_full_batches_of_different_sequences_have_a_place_each(drafter: DeviceEagle3Drafter):
    waiting, source, *idle = (sequence_in(*blocks) for blocks in ((0, 1), (2, 3), (4, 5), (6, 7)))
    last, behind = (sequence_in(8, 9), sequence_in(10, 11)), sequence_in(2, 12)
    compute(drafter, (waiting, 0, 3), (source, 0, SIZE))
    compute(drafter, *((each, 0, 3) for each in idle))
    compute(drafter, *((each, 0, 3) for each in last))
    batch = compute(drafter, (waiting, 3, 1), (behind, SIZE, 2))
    assert batch.reads.slots[0] == 3, "its feature is there"
    assert len({batch.reads.before[0], *batch.loaded[1], *batch.kept[1]}) == NUM_PLACES


def test_a_state_that_was_told_no_batch_writes_no_slot_block_or_place(state: HeadState):
    for name, value in (("slots", -1), ("draft_slots", -1), ("blocks", NUM_BLOCKS), ("kept_in", len(state.pool) - 1)):
        assert (state.column(name) == value).all(), name
