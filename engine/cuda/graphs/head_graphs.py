"""What a draft head does in a step, captured: drafts before the model's step, and reads behind it."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from engine.cuda.inputs.buckets import batch_buckets, bucket_for, place_buckets
from engine.cuda.inputs.decode_state import DecodeState
from engine.cuda.inputs.head_inputs import HeadState
from engine.cuda.model.eagle3_head import DeviceEagle3Head, DeviceHeadRows
from engine.cuda.runtime.graph_capture import HeldLaunches, Record


class DraftGraphs:
    """The drafts of some tokens for some answers, put where the step that verifies them looks for these."""

    def __init__(self, head: DeviceEagle3Head, state: DecodeState, reads: HeadState) -> None:
        self._head, self._state, self._reads = head, state, reads
        self._buckets, self._lengths = batch_buckets(reads.max_drafting), place_buckets(reads.max_places)
        self._held = HeldLaunches[tuple[int, int]](lambda size: partial(self._draft, *size))

    @property
    def sizes(self) -> SequenceOf[tuple[int, int]]:
        """Answers and places."""
        return list(product(reversed(self._buckets), reversed(self._lengths)))

    @torch.inference_mode()
    def capture(self, record: Record, sizes: SequenceOf[tuple[int, int]]) -> None:
        for size in sizes:
            self._held.hold(record, size)

    def release(self) -> None:
        self._held.release()

    @torch.inference_mode()
    def draft(self, num_answers: int, num_places: int) -> None:
        self._held.run((bucket_for(self._buckets, num_answers), bucket_for(self._lengths, num_places)))

    def _draft(self, num_answers: int, num_places: int) -> None:
        state, reads = self._state, self._reads
        rows = reads.column("rows")[:num_answers]
        tables = state.tables.index_select(0, rows)
        tokens = state.gather_tokens(state.max_rows).index_select(0, rows)
        features = reads.pool.index_select(0, reads.column("draft_before")[:num_answers])
        positions = reads.column("draft_positions").view(reads.max_places, -1)
        slots = reads.column("draft_slots").view(reads.max_places, -1)
        starts, lengths = reads.column("starts")[:num_answers], positions + 2
        for place in range(num_places):
            row = DeviceHeadRows(features, tokens, positions[place, :num_answers], slots[place, :num_answers])
            tokens, features = self._head.step(row, tables, starts, lengths[place, :num_answers])
            reads.drafted[place, :num_answers].copy_(tokens)
        state.drafted.copy_(reads.drafted.view(-1).index_select(0, reads.column("sources")))


class ReadGraphs:
    """The rows of a decode step, read by the head behind it."""

    def __init__(self, head: DeviceEagle3Head, state: DecodeState, reads: HeadState, aux: Tensor) -> None:
        self._head, self._state, self._reads, self._aux = head, state, reads, aux
        self._buckets = batch_buckets(state.max_rows)
        self._held = HeldLaunches[int](lambda rows: partial(self._read, rows))

    @property
    def sizes(self) -> SequenceOf[int]:
        """Numbers of rows."""
        return self._buckets[::-1]

    @torch.inference_mode()
    def capture(self, record: Record, sizes: SequenceOf[int]) -> None:
        for rows in sizes:
            self._held.hold(record, rows)

    def release(self) -> None:
        self._held.release()

    @torch.inference_mode()
    def read(self, num_rows: int) -> None:
        """Read the first rows of the step, padded."""
        self._held.run(bucket_for(self._buckets, num_rows))

    def _read(self, rows: int) -> None:
        reads = self._reads
        kept_from, kept_in = reads.column("kept_from"), reads.column("kept_in")
        before, positions, slots, blocks = (
            reads.column(name)[:rows] for name in ("before", "positions", "slots", "blocks")
        )
        batch = ReadRows(kept_from, kept_in, before, self._state.token_ids[:rows], positions, slots, blocks)
        batch.read(self._head, reads, self._aux[:rows])


@dataclass(frozen=True)
class ReadRows:
    """A batch on the device, see HeadBatch and HeadReads."""

    kept_from: Tensor
    kept_in: Tensor
    before: Tensor
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    blocks: Tensor

    def read(self, head: DeviceEagle3Head, reads: HeadState, aux: Tensor) -> None:
        """Keep features of the batch before, make those of all rows, and write K and V."""
        reads.pool.index_copy_(0, self.kept_in, reads.pool.index_select(0, self.kept_from))
        features = reads.pool[: len(aux)]
        head.fuse(aux, features)
        reads.ends.index_copy_(0, self.blocks, features)
        head.write(DeviceHeadRows(reads.pool.index_select(0, self.before), self.token_ids, self.positions, self.slots))
