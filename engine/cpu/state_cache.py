"""The states of recurrent layers on the CPU, in pages, and what a batch reads and writes of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from contracts.layout import KVGroup
from engine.cache.group_page_table import ABSENT, GroupPageTable
from engine.scheduler.batch import ScheduledChunk


class StateCache:
    """The pages of the states of all recurrent layers.

    They are float32 `[layers, num_pages, key heads, state width]`. `table`: which page a block has; that of a block
    that is being filled is its sequence's live state.
    """

    def __init__(self, group: KVGroup, table: GroupPageTable) -> None:
        self.group, self.table = group, table
        # Written once now, as KVCache does.
        self._data = torch.zeros(group.num_layers, table.num_pages, group.num_kv_heads, group.head_dim)

    @property
    def pool_bytes(self) -> np.ndarray:
        """`[num_planes, num_pages, page_nbytes]` uint8, the same memory."""
        return self._data.flatten(2).view(torch.uint8).numpy()

    def state(self, layer: int, page: int) -> torch.Tensor:
        """Return the state of one of the model's layers in a page, `[key heads, state width]`."""
        return self._data[self.group.layers.index(layer), page]


@dataclass(frozen=True)
class StatePiece:
    """A piece of a batch as recurrent layers see it.

    `rows`: of the batch. `source`: the page of the state before its first token, ABSENT at a sequence's begin. `stops`:
    behind so many of its rows the state is kept in a page; the last is behind all. `is_answer`: it is computed token by
    token, as what was decoded was.
    """

    rows: slice
    source: int
    stops: tuple[tuple[int, int], ...]
    is_answer: bool


@dataclass(frozen=True)
class StateUpdate:
    """The states that a batch reads, and those that it leaves.

    Nothing is written before `commit`: a batch that fails half way runs again, and a live state in its page would have
    taken in the tokens twice.
    """

    cache: StateCache
    pieces: tuple[StatePiece, ...]
    _left: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = field(default_factory=list)

    def before(self, layer: int, piece: StatePiece) -> torch.Tensor:
        """Return a layer's state before a piece, `[key heads, state width]`; zeros where a sequence begins."""
        if piece.source == ABSENT:
            return torch.zeros(self.cache.group.num_kv_heads, self.cache.group.head_dim)
        return self.cache.state(layer, piece.source)

    def leave(self, layer: int, page: int, *parts: torch.Tensor) -> None:
        """Keep a state for a page: its parts `[key heads, ..]`, side by side."""
        self._left.append((self.cache.state(layer, page), parts))

    def commit(self) -> None:
        """Write what was left."""
        for page, parts in self._left:
            for columns, part in zip(page.split([part[0].numel() for part in parts], 1), parts, strict=True):
                columns.copy_(part.flatten(1))
        self._left.clear()


def plan_states(pieces: Sequence[ScheduledChunk], cache: StateCache) -> StateUpdate:
    """Return what recurrent layers do with the pieces of a batch, whose rows are their tokens in order."""
    planned: list[StatePiece] = []
    first_row = 0
    for piece in pieces:
        assert not piece.draft, "a state can't go back behind drafts that were wrong"
        planned.append(_planned(piece, slice(first_row, first_row + piece.num_rows), cache))
        first_row += piece.num_rows
    return StateUpdate(cache, tuple(planned))


def _planned(piece: ScheduledChunk, rows: slice, cache: StateCache) -> StatePiece:
    size, blocks = cache.group.block_size, piece.sequence.blocks
    page_of = cache.table.page_of
    places = range(piece.first_token // size, -(-piece.end // size))
    ends = [(min((place + 1) * size, piece.end), int(page_of[blocks[place]])) for place in places]
    stops = tuple((end - piece.first_token, page) for end, page in ends if page != ABSENT)
    assert stops and stops[-1][0] == piece.num_tokens, "a chunk ends in a block without a page for its state"
    source = int(page_of[blocks[(piece.first_token - 1) // size]]) if piece.first_token else ABSENT
    assert (source == ABSENT) == (piece.first_token == 0), "the state before a chunk is gone"
    assert piece.is_answer or piece.first_token % size == 0, "a chunk of a prompt begins inside a block"
    return StatePiece(rows, source, stops, piece.is_answer)
