"""What the host knows of an EAGLE3 head on a GPU: what that has read, and where its features are."""

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from engine.cuda.inputs.head_inputs import HeadBatch, HeadDrafts, HeadReads, HeadState, places
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from engine.settings import MAX_DRAFT_TOKENS
from engine.speculative.draft_presence import DraftPresence
from engine.speculative.proposer import NO_DRAFT, UNKNOWN, Draft

_STRENGTH = 1
"""The strength of each draft: its tokens are unknown as it is proposed, and so is how good they are."""


@dataclass(frozen=True)
class _Rows:
    """The rows of a sequence in the last batch, of `count` tokens from `first` on."""

    row: int
    first: int
    count: int

    def row_of(self, token: int) -> int:
        return self.row + token - self.first


@dataclass(frozen=True)
class _Before:
    """The place of a feature in the pool, and the block that it is loaded from, if it comes from one."""

    place: int
    block: int | None = None


@dataclass(frozen=True)
class _Run:
    """The first token of a sequence from which on the head has read all, as long as these are its blocks."""

    start: int
    blocks: "array[int]"


class DeviceEagle3Drafter:
    """See engine.backend.Drafter.

    The device reads each batch as soon as it is computed, and drafts at the start of the step that verifies the drafts:
    so these are of unknown tokens when they are proposed. A guessed token is read as if it were right, and its slot is
    written again with the right one. To go on behind token j the head needs the feature of token j - 1: it is in the
    rows of the last batch, or in a place that is kept for the sequence, or, where a block ends with that token, with
    the block.
    """

    def __init__(self, state: HeadState, block_size: int) -> None:
        self._max_rows, self._num_blocks, self._size = state.max_rows, state.num_blocks, block_size
        self._max_drafting, self._num_kept = state.max_drafting, state.num_kept
        self._presence = DraftPresence(np.zeros(state.num_blocks, np.int32), block_size)
        self._free = list(range(self._num_kept))
        self._places: dict[Sequence, int] = {}
        self._kept: dict[Sequence, int] = {}
        self._last: dict[Sequence, _Rows] = {}
        self._runs: dict[Sequence, _Run] = {}

    def forget_blocks(self, blocks: SequenceOf[int]) -> None:
        self._presence.forget(blocks)

    def settle(self, sequence: Sequence) -> None:
        """Nothing of the head leaves this device."""

    def end_sequence(self, sequence: Sequence) -> None:
        for known in (self._last, self._kept, self._runs):
            known.pop(sequence, None)
        if sequence in self._places:
            self._free.append(self._places.pop(sequence))

    def propose(self, sequences: SequenceOf[Sequence], num_tokens: SequenceOf[int]) -> list[Draft]:
        return [
            Draft((UNKNOWN,) * min(count, MAX_DRAFT_TOKENS), _STRENGTH)
            if count > 0 and self._can_go_on(each)
            else NO_DRAFT
            for each, count in zip(sequences, num_tokens, strict=True)
        ]

    def batch(self, pieces: SequenceOf[ScheduledChunk]) -> HeadBatch:
        """Return what the head does for a batch that is launched next, of decodes and then prompts."""
        kept = {
            sequence: found for sequence, rows in self._last.items() if (found := self._newest(sequence, rows, pieces))
        }
        sources = {sequence: rows.row_of(self._kept[sequence]) for sequence, (rows, _) in kept.items()}
        loaded: list[tuple[int, int]] = []
        reads: list[HeadReads] = []
        last: dict[Sequence, _Rows] = {}
        row = 0
        for piece in pieces:
            sequence = piece.sequence
            before = self._before(piece, pieces)
            if before is not None and before.block is not None:
                kept.pop(sequence, None)
                sources.pop(sequence, None)
                loaded.append((before.block, before.place))
            reads.append(self._reads(piece, row, None if before is None else before.place))
            last[sequence] = _Rows(row, piece.first_token, piece.num_rows)
            row += piece.num_rows
        self._last = last
        moves = [(sources[sequence], place) for sequence, (_, place) in kept.items()]
        return HeadBatch(places(moves), places(loaded), _join_reads(reads), self._drafts(pieces, sources))

    def forget_batch(self) -> None:
        """Note that nobody knows what was read of the last batch, and which features were kept before."""
        self._kept.clear()
        self._last = {}

    def _can_go_on(self, sequence: Sequence) -> bool:
        """Return whether the slot of the newest token can be written, behind which drafts go on."""
        newest = len(sequence.tokens) - 1
        return newest > 0 and self._run_start(sequence, newest) < newest

    def _run_start(self, sequence: Sequence, end: int) -> int:
        """Return the token from which on the head has read all up to `end`; it is `end` if not the one before."""
        run = self._runs.get(sequence)
        if run is None or run.blocks is not sequence.blocks:
            run = _Run(self._presence.run_start(sequence.blocks, end), sequence.blocks)
            self._runs[sequence] = run
        return min(run.start, end)

    def _newest(self, sequence: Sequence, rows: _Rows, pieces: SequenceOf[ScheduledChunk]) -> tuple[_Rows, int] | None:
        """Note that the feature of the newest token in the last batch is kept.

        Returns where it was and will be; None of a sequence that was preempted.
        """
        newest = min(sequence.num_computed, rows.first + rows.count) - 1
        if newest < rows.first:
            self._kept.pop(sequence, None)
            return None
        self._kept[sequence] = newest
        return rows, self._place(sequence, pieces)

    def _place(self, sequence: Sequence, pieces: SequenceOf[ScheduledChunk]) -> int:
        """Return the place in the pool that is kept for a sequence of these pieces or of the last batch."""
        if sequence not in self._places:
            if not self._free:
                self._free_idle(pieces)
            self._places[sequence] = self._free.pop()
        return self._max_rows + self._places[sequence]

    def _free_idle(self, pieces: SequenceOf[ScheduledChunk]) -> None:
        """Free the place of a sequence that is neither in the last batch nor has one of these pieces.

        There is one: places are for twice as many sequences as a batch has, and one of these has none.
        """
        present = {piece.sequence for piece in pieces}
        idle = next(each for each in self._places if each not in self._last and each not in present)
        self._kept.pop(idle, None)
        self._free.append(self._places.pop(idle))

    def _before(self, piece: ScheduledChunk, pieces: SequenceOf[ScheduledChunk]) -> "_Before | None":
        """Return where the feature of the token before a piece will be; `pieces`: all of the batch.

        None where it is not known: the head sees what is before no more.
        """
        sequence, first = piece.sequence, piece.first_token
        if first == 0:
            return None
        if self._kept.get(sequence) == first - 1:
            return _Before(self._place(sequence, pieces))
        before = sequence.blocks[(first - 1) // self._size]
        if self._presence.run_start(sequence.blocks, first) == first:
            return None
        if first % self._size == 0:
            self._kept[sequence] = first - 1
            return _Before(self._place(sequence, pieces), before)
        self._presence.forget([before])
        return None

    def _reads(self, piece: ScheduledChunk, row: int, before: int | None) -> HeadReads:
        """Return the rows of a piece, which begin at `row` of the batch."""
        sequence, size, first = piece.sequence, self._size, piece.first_token
        self._presence.add(sequence.blocks, first, first + piece.num_rows)
        if before is None or not piece.is_decode:
            self._runs.pop(sequence, None)
        tokens = np.arange(first, first + piece.num_rows)
        blocks = np.frombuffer(sequence.blocks, np.int32)[tokens // size].astype(np.int64)
        slots = blocks * size + tokens % size
        sources = row - 1 + np.arange(piece.num_rows, dtype=np.int32)
        sources[0] = before or 0
        if before is None:
            slots[0] = -1
        ends = np.where((tokens + 1) % size == 0, blocks, self._num_blocks)
        return HeadReads(sources, slots, np.maximum(tokens - 1, 0).astype(np.int32), ends)

    def _drafts(self, pieces: SequenceOf[ScheduledChunk], sources: dict[Sequence, int]) -> HeadDrafts | None:
        """Return what is drafted for a batch; `sources`: the rows of the last one whose features are kept."""
        firsts = np.cumsum([0, *(piece.num_rows for piece in pieces)])
        asked = [index for index, piece in enumerate(pieces) if piece.draft.is_unknown]
        if not asked:
            return None
        rows, asking = firsts[asked].astype(np.int32), [pieces[index] for index in asked]
        lengths = np.array([len(piece.draft) for piece in asking])
        newest = np.array([piece.first_token for piece in asking])
        place = np.arange(lengths.max())[:, None]
        tokens = newest + np.minimum(place, lengths - 1)
        slots = _blocks_at(asking, tokens // self._size) * self._size + tokens % self._size
        return HeadDrafts(
            rows=rows,
            before=np.array([self._source(piece.sequence, sources) for piece in asking], np.int32),
            starts=np.array([self._start(piece) for piece in asking], np.int32),
            slots=np.where(place < lengths, slots, -1),
            positions=(tokens - 1).astype(np.int32),
            sources=_draft_sources(rows, lengths, self._max_drafting),
        )

    def _source(self, sequence: Sequence, sources: dict[Sequence, int]) -> int:
        """Return where the feature is as the step begins: of a sequence without one, the place that pads."""
        return sources.get(sequence, self._max_rows + self._places.get(sequence, self._num_kept))

    def _start(self, piece: ScheduledChunk) -> int:
        return self._run_start(piece.sequence, piece.first_token) + 1


def _blocks_at(pieces: SequenceOf[ScheduledChunk], columns: np.ndarray) -> np.ndarray:
    """Return the blocks of pieces in these columns of their sequences' tables; both are `[k, pieces]`."""
    blocks = [
        np.frombuffer(piece.sequence.blocks, np.int32)[column] for piece, column in zip(pieces, columns.T, strict=True)
    ]
    return np.array(blocks, np.int64).T


def _draft_sources(rows: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """Return HeadDrafts.sources, of newest tokens in these rows and `width` drafts to a place."""
    sources = np.zeros(rows[-1] + 1 + lengths[-1], np.int32)
    for owner, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        sources[row + 1 : row + 1 + length] = np.arange(length) * width + owner
    return sources


def _join_reads(reads: SequenceOf[HeadReads]) -> HeadReads:
    return HeadReads(
        before=np.concatenate([each.before for each in reads]),
        slots=np.concatenate([each.slots for each in reads]),
        positions=np.concatenate([each.positions for each in reads]),
        blocks=np.concatenate([each.blocks for each in reads]),
    )
