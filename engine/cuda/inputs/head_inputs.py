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
        sizes = {
            "kept_from": num_kept, "before": max_step_rows, "positions": max_step_rows, "rows": max_drafting,
            "draft_before": max_drafting, "starts": max_drafting, "draft_positions": max_places * max_drafting,
            "sources": max_step_rows,
        }  # fmt: skip
        wide = {
            "kept_in": num_kept, "slots": max_step_rows, "blocks": max_step_rows,
            "draft_slots": max_places * max_drafting,
        }  # fmt: skip
        self._wide = torch.zeros(sum(wide.values()), dtype=torch.int64, device=device)
        self._narrow = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        self._rooms = _split(self._wide, wide) | _split(self._narrow, sizes)
        self._sizes, self._wide_sizes = sizes, wide

    def column(self, name: str) -> Tensor:
        return self._rooms[name]

    def put(self, batch: HeadBatch) -> None:
        """What a step needs, and drafts: two copies to the device. The rows of prompts are not among it."""
        reads, drafts = batch.reads, batch.drafts
        arrays: dict[str, np.ndarray] = {}
        if len(reads.before) <= len(self.column("before")):
            arrays = {"kept_from": batch.kept[0], "kept_in": batch.kept[1], "before": reads.before}
            arrays |= {"positions": reads.positions, "slots": reads.slots, "blocks": reads.blocks}
        if drafts is not None:
            arrays |= {"rows": drafts.rows, "draft_before": drafts.before, "starts": drafts.starts}
            arrays |= {"sources": drafts.sources}
            arrays["draft_slots"] = _spread(drafts.slots, self.max_drafting, -1)
            arrays["draft_positions"] = _spread(drafts.positions, self.max_drafting, 0)
        self._copy(self._wide, self._wide_sizes, arrays, np.int64)
        self._copy(self._narrow, self._sizes, arrays, np.int32)

    def _copy(self, room: Tensor, sizes: dict[str, int], arrays: dict[str, np.ndarray], dtype: type) -> None:
        packed, start = np.zeros(len(room), dtype), 0
        for name, size in sizes.items():
            if name in ("slots", "draft_slots"):
                packed[start : start + size] = -1
            elif name in ("blocks", "kept_in"):  # the spare block, and the place that pads
                packed[start : start + size] = self.num_blocks if name == "blocks" else len(self.pool) - 1
            if name in arrays:
                packed[start : start + arrays[name].size] = arrays[name].reshape(-1)
            start += size
        room.copy_(page_locked(packed, room.device), non_blocking=True)


def no_places() -> tuple[np.ndarray, np.ndarray]:
    """Return that nothing is kept, or loaded."""
    return np.zeros(0, np.int32), np.zeros(0, np.int64)


def places(pairs: SequenceOf[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (from, to) as two arrays."""
    if not pairs:
        return no_places()
    sources, targets = zip(*pairs, strict=True)
    return np.array(sources, np.int32), np.array(targets, np.int64)


def _split(whole: Tensor, sizes: dict[str, int]) -> dict[str, Tensor]:
    return dict(zip(sizes, whole.split(list(sizes.values())), strict=True))


def _spread(array: np.ndarray, width: int, value: int) -> np.ndarray:
    """Return `[k, D]` as `[k, width]`."""
    return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=value)
