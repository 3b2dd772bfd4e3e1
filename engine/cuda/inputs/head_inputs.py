"""What a draft head reads of a batch, as numpy arrays, and where it lies on the device."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.cuda.runtime.upload import page_locked


@dataclass(frozen=True)
class HeadReads:
    """Rows of a batch, `[R]` each, whose K and V the head writes once their features are there.

    `before`: where the feature of the token before is (HeadState.pool), `slots` of K and V or -1, `positions` of the
    features, `blocks`: where the row's own feature is kept because it is the last of its block, else the spare one.
    """

    before: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    blocks: np.ndarray


@dataclass(frozen=True)
class HeadDrafts:
    """The answers that the head drafts for, `[D]` each, and the rows of the step that verify it.

    `rows`: of the step, with the newest token of each; `before`: where the feature of the token before that is;
    `starts`: the first slot that each sees. `slots`, `positions` `[k, D]`: of the newest token and of drafts behind it,
    the slot -1 for a draft that nobody verifies. `sources` `[rows of the step]`: the place of a row's token among
    drafts, by place and answer.
    """

    rows: np.ndarray
    before: np.ndarray
    starts: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    sources: np.ndarray

    @property
    def num_places(self) -> int:
        return len(self.slots)


@dataclass(frozen=True)
class HeadBatch:
    """What a head does for a batch.

    Before it features are kept, those of rows `kept[0]` of the batch before in the places `kept[1]`, those of the ends
    of blocks `loaded[0]` in `loaded[1]`. `reads` are the rows of all pieces, `drafts` what is drafted for it.
    """

    kept: tuple[np.ndarray, np.ndarray]
    loaded: tuple[np.ndarray, np.ndarray]
    reads: HeadReads
    drafts: HeadDrafts | None


class HeadState:
    """The arrays of a captured step, at addresses that graphs keep, and features `[., hidden]`.

    `pool`: of the rows of the last batch, behind `max_rows` of them those kept, a place for each sequence, the last of
    which pads. `ends`: of the last token of each block. `drafted` `[k, D]`: tokens.
    """

    def __init__(
        self, max_rows: int, max_step_rows: int, max_drafting: int, max_places: int, num_kept: int, num_blocks: int,
        width: int, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.max_rows, self.max_drafting, self.max_places = max_rows, max_drafting, max_places
        self.num_kept, self.num_blocks = num_kept, num_blocks

        def column(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.pool = column(max_rows + num_kept + 1, width, dtype=dtype)
        self.ends = column(num_blocks + 1, width, dtype=dtype)
        self.drafted = column(max_places, max_drafting, dtype=torch.int64)
        wide = {
            "kept_in": num_kept, "slots": max_step_rows, "blocks": max_step_rows,
            "draft_slots": max_places * max_drafting,
        }  # fmt: skip
        narrow = {
            "kept_from": num_kept, "before": max_step_rows, "positions": max_step_rows, "rows": max_drafting,
            "draft_before": max_drafting, "starts": max_drafting, "draft_positions": max_places * max_drafting,
            "sources": max_step_rows,
        }  # fmt: skip
        self._blank = np.zeros(2 * sum(wide.values()) + sum(narrow.values()), np.int32)
        blank = _split(torch.from_numpy(self._blank), wide, narrow)
        blank["slots"].fill_(-1)
        blank["draft_slots"].fill_(-1)
        blank["blocks"].fill_(num_blocks)  # the spare one
        blank["kept_in"].fill_(len(self.pool) - 1)  # the place that pads
        self._words = torch.from_numpy(self._blank.copy()).to(device)
        self._columns = _split(self._words, wide, narrow)
        self._places = {name: column.storage_offset() for name, column in self._columns.items()}

    def column(self, name: str) -> Tensor:
        return self._columns[name]

    def put(self, batch: HeadBatch) -> None:
        """What a step needs, and drafts, in one copy to the device. The rows of prompts are not among it."""
        reads, drafts = batch.reads, batch.drafts
        words = self._blank.copy()
        wide = words[: len(words) // 2 * 2].view(np.int64)

        def fill(name: str, array: np.ndarray) -> None:
            room, start = (wide if array.itemsize == 8 else words), self._places[name]
            room[start : start + len(array)] = array

        if len(reads.before) <= len(self._columns["before"]):
            fill("kept_from", batch.kept[0])
            fill("kept_in", batch.kept[1])
            for name in ("before", "positions", "slots", "blocks"):
                fill(name, getattr(reads, name))
        if drafts is not None:
            fill("rows", drafts.rows)
            fill("draft_before", drafts.before)
            fill("starts", drafts.starts)
            fill("sources", drafts.sources)
            for place in range(drafts.num_places):
                start, count = place * self.max_drafting, len(drafts.rows)
                first = self._places["draft_slots"] + start
                wide[first : first + count] = drafts.slots[place]
                first = self._places["draft_positions"] + start
                words[first : first + count] = drafts.positions[place]
        self._words.copy_(page_locked(words, self._words.device), non_blocking=True)


def no_places() -> tuple[np.ndarray, np.ndarray]:
    """Return that nothing is kept, or loaded."""
    return np.zeros(0, np.int32), np.zeros(0, np.int64)


def places(pairs: SequenceOf[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (from, to) as two arrays."""
    if not pairs:
        return no_places()
    sources, targets = zip(*pairs, strict=True)
    return np.array(sources, np.int32), np.array(targets, np.int64)


def _split(words: Tensor, wide: dict[str, int], narrow: dict[str, int]) -> dict[str, Tensor]:
    """Return the columns, those of 64-bit values first."""
    halves = words.split([2 * sum(wide.values()), sum(narrow.values())])
    columns = dict(zip(wide, halves[0].view(torch.int64).split(list(wide.values())), strict=True))
    return columns | dict(zip(narrow, halves[1].split(list(narrow.values())), strict=True))
